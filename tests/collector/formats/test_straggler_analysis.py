"""NDTimeline traces: what goes in comes out, spans say the same, and bad files leave nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import polars
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.datasets import dataset

from unskew.collector.formats.exporters import straggler_analysis as straggler_export
from unskew.collector.formats.importers.straggler_analysis import COLUMNS, KINDS, LENGTHS, operations
from unskew.collector.formats.registry import FormatError, bring_in
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store


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


@pytest.mark.slow
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
        ({"optype": ["forward-compute"] * 4}, r"row 2: an earlier row has the same rank, step, optype and seq_id"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_imported(tmp_path: Path, columns: dict[str, list[object]], sentence: str) -> None:
    with pytest.raises(FormatError, match=re.escape(str(tmp_path)) + r".*" + sentence):
        imported(tmp_path, trace(**columns))
    assert not list((tmp_path / "store").rglob("*.jsonl"))


@pytest.mark.parametrize(
    "given", [b"", b"\xff", b"{}", b"[[0, 0, [-1]]]", b"[[0, 0, [1.5]]]", b"[[0, 0, 7]]", b"[[18446744073709551616, 0, []]]"]
)
def test_lengths_that_are_none_are_refused_in_a_sentence(tmp_path: Path, given: bytes) -> None:
    path, store = tmp_path / "trace.parquet", Store.locate(tmp_path / "store")
    pyarrow.parquet.write_table(trace().to_arrow().replace_schema_metadata({LENGTHS: given}), path)
    with pytest.raises(FormatError, match=r"trace\.parquet: its metadata unskew\.lengths are no lengths of documents"):
        bring_in(store, "straggler-analysis", path)
    assert not store.spooled_runs()


def test_the_same_file_again_changes_nothing_and_another_under_its_name_is_refused(tmp_path: Path) -> None:
    store, run = imported(tmp_path, trace())
    before = sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*.jsonl"))
    assert [one.already for one in bring_in(store, "straggler-analysis", tmp_path / "trace.parquet")] == [True]
    trace(seq_id=[1] * 4).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(FormatError, match="holds something else"):
        bring_in(store, "straggler-analysis", tmp_path / "other.parquet", run)
    assert sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*.jsonl")) == before


SECONDS = st.floats(0, 100, width=32, allow_nan=False)
OPERATIONS = st.tuples(st.integers(0, 3), st.integers(0, 40), st.sampled_from(sorted(KINDS)), SECONDS, SECONDS)


@pytest.mark.slow
@pytest.mark.limit(120)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(OPERATIONS, min_size=1, max_size=30), seed=st.integers(0, 2**16))
def test_any_trace_survives_export_and_import(
    tmp_path: Path, drawn: list[tuple[int, int, str, float, float]], seed: int
) -> None:
    rows = polars.DataFrame(
        [
            {
                "dp_rank": rank % 2, "stage": rank // 2, "rank": 300 * rank, "step": step, "optype": optype, "start_ts": start,
                "duration": wall, "seq_id": place, "mc": place % 3 - 1, "mb_id": place - 1, "gmc": 300 * (place % 2),
            }
            for place, (rank, step, optype, start, wall) in enumerate(drawn)
        ],
        schema_overrides=COLUMNS,
    )  # fmt: skip
    folder = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    store, run = imported(folder, rows.sample(fraction=1, shuffle=True, seed=seed))
    with open_store(store) as reader:
        straggler_export.write(reader, run, folder / "out.parquet")
    (back,) = bring_in(store, "straggler-analysis", folder / "out.parquet", "back")
    with open_store(store) as reader:
        found = operations(reader, back.run)
    order = ["step", "rank", "optype", "seq_id"]
    assert found.sort(order).equals(rows.sort(order))


@pytest.mark.slow
@pytest.mark.limit(120)
def test_an_import_that_is_killed_leaves_nothing_to_be_seen_and_can_be_done_again(tmp_path: Path) -> None:
    big = polars.concat([trace(step=[step] * 4) for step in range(4_000)])
    big.write_parquet(tmp_path / "big.parquet")
    store = Store.locate(tmp_path / "store")
    command = [sys.executable, "-m", "unskew", "import", "straggler-analysis", str(tmp_path / "big.parquet"), "--run", "big"]
    with subprocess.Popen([*command, "--store", str(store.root)], stdout=subprocess.DEVNULL) as process:
        written = store.root / "importing" / "big"
        while process.poll() is None and not list(written.rglob("*.jsonl")):
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -9, "the import was over before it could be killed"
    assert store.spooled_runs() == []
    with open_store(store) as reader:
        assert reader.runs().is_empty()
    (stored,) = bring_in(store, "straggler-analysis", tmp_path / "big.parquet", "big")
    assert stored.iterations == 4_000
    assert not written.exists()
