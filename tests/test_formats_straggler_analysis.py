"""NDTimeline traces: what goes in comes out, spans say the same, and bad files leave nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import polars
import pytest
from datasets import dataset

from unskew.collector.formats import FormatError, bring_in
from unskew.collector.formats.straggler_analysis import COLUMNS, operations
from unskew.collector.paths import Store
from unskew.collector.reader import open_store


def trace(**columns: list[object]) -> polars.DataFrame:
    """Two stages, one replica, one step, one micro-batch; columns replaced as given."""
    rows: dict[str, list[object]] = {
        "dp_rank": [0] * 4,
        "stage": [0, 0, 1, 1],
        "rank": [0, 0, 4, 4],
        "step": [7] * 4,
        "optype": ["forward-compute", "forward-send", "forward-recv", "forward-compute"],
        "start_ts": [0.0, 0.1, 0.05, 0.15000001],
        "duration": [0.1, 0.05, 0.1, 0.2],
        "seq_id": [0] * 4,
        "mc": [0, -1, -1, 0],
        "mb_id": [0, -1, -1, 0],
        "gmc": [0, -1, -1, 1],
    }
    return polars.DataFrame(rows | columns, schema_overrides=COLUMNS)


def imported(folder: Path, rows: polars.DataFrame) -> tuple[Store, str]:
    rows.write_parquet(folder / "trace.parquet")
    store = Store.locate(folder / "store")
    (stored,) = bring_in(store, "straggler-analysis", folder / "trace.parquet")
    return store, stored.run


def test_spans_say_in_our_words_what_the_rows_say(tmp_path: Path) -> None:
    store, run = imported(tmp_path, trace())
    with open_store(store) as reader:
        spans = reader.sql('select kind, rank, iteration, micro_batch, start_us, wall_us, compute_us, peer, "group" from spans')
        assert reader.sql("select clock, ranks, iterations, status from runs").row(0) == ("imported", 2, 1, "done")
        assert operations(reader, run).equals(trace())
    assert spans.rows() == [
        ("F", 0, 7, 0, 0, 100_000, 100_000, None, "forward-compute"),
        ("send", 0, 7, None, 100_000, 50_000, None, 4, "forward-send"),
        ("recv", 4, 7, None, 50_000, 100_000, None, 0, "forward-recv"),
        ("F", 4, 7, 0, 150_000, 200_000, 200_000, None, "forward-compute"),
    ]


@pytest.mark.parametrize("name", ["ops-ST.parquet", "ops-SE-windows12.parquet"])
def test_published_traces_come_back_to_the_last_bit(tmp_path: Path, name: str) -> None:
    rows = polars.read_parquet(dataset("bytedance-straggler", name))
    store, run = imported(tmp_path, rows)
    with open_store(store) as reader:
        found = operations(reader, run)
    expected = rows.select(polars.col(column).cast(dtype) for column, dtype in COLUMNS.items())
    order = ["step", "rank", "optype", "seq_id"]
    assert found.sort(order).equals(expected.sort(order))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"optype": ["forward-compute", "forward-send", "teleport", "forward-compute"]}, r"row 3: its optype is none of"),
        ({"duration": [0.1, -0.05, 0.1, 0.2]}, r"row 2: its duration is negative"),
        ({"start_ts": [0.0, 0.1, 0.05, float("nan")]}, r"row 4: .* not a finite number"),
        ({"rank": [0, None, 4, 4]}, r"row 2: a value is missing"),
        ({"stage": [0, 1, 1, 1]}, r"row 2: its rank has another dp_rank or stage"),
        ({"optype": ["forward-compute"] * 4}, r"row 2: the same rank, step, optype and seq_id"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_imported(tmp_path: Path, columns: dict[str, list[object]], sentence: str) -> None:
    with pytest.raises(FormatError, match=re.escape(str(tmp_path)) + r".*" + sentence):
        imported(tmp_path, trace(**columns))
    assert not list((tmp_path / "store").rglob("*.jsonl"))


def test_the_same_file_again_changes_nothing_and_another_under_its_name_is_refused(tmp_path: Path) -> None:
    store, run = imported(tmp_path, trace())
    before = sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*.jsonl"))
    assert [one.already for one in bring_in(store, "straggler-analysis", tmp_path / "trace.parquet")] == [True]
    trace(seq_id=[1] * 4).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(FormatError, match="holds something else"):
        bring_in(store, "straggler-analysis", tmp_path / "other.parquet", run)
    assert sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*.jsonl")) == before
