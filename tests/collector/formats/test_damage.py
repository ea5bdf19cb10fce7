"""Files that would bend what the log says, or end an import in the middle: refused in a sentence, or read as they are."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars
import pytest
from support.traces.trace_records import ENTRY, OPERATION, TITAN
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.formats.exporters import straggler_analysis as straggler_export
from unskew.collector.formats.imported import Source, fingerprint, store_runs
from unskew.collector.formats.importers import iteration_times, straggler_analysis
from unskew.collector.formats.importers.straggler_analysis import operations
from unskew.collector.formats.registry import FormatError, bring_in
from unskew.collector.locks import hold
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store

pytestmark = pytest.mark.limit(120)
NESTED = "[" * 100_000 + "]" * 100_000


def titan(**changed: Any) -> str:
    return json.dumps(TITAN | changed) + "\n"


def megatron(iteration: object = 1, elapsed: object = "5.0 |", rest: str = "\n") -> str:
    return f" iteration {iteration}/ 500 | consumed samples: 16 | elapsed time per iteration (ms): {elapsed}{rest}"


def mllog(value: object, step: object = 3) -> str:
    return ":::MLLOG " + json.dumps({"time_ms": 1, "key": "train_step_time", "value": value, "metadata": {"step": step}}) + "\n"


def kineto(*names: str, **event: Any) -> str:
    steps = [{"ph": "X", "cat": "user_annotation", "name": name, "ts": 10.0 * at, "dur": 9.0} for at, name in enumerate(names)]
    return json.dumps({"traceEvents": [*steps, event]})


def dump(**changed: Any) -> bytes:
    return pickle.dumps({"entries": [ENTRY | changed]})


def nested_dump() -> bytes:
    text = pickle.dumps({"entries": [ENTRY | {"input_sizes": "HERE"}]}, protocol=2)
    return text.replace(b"X\x04\x00\x00\x00HERE", b"]" * 5_000 + b"a" * 4_999)


@pytest.mark.parametrize(
    ("format", "name", "text", "sentence"),
    [
        ("torchtitan", "a.jsonl", NESTED, "line 1: not JSON"),
        ("torchtitan", "a.jsonl", titan(value=-5), "line 1: value (ms) is negative"),
        ("torchtitan", "a.jsonl", titan() + titan(rank=2**31), "line 2: rank is 2147483648"),
        ("torchtitan", "a.jsonl", titan(rank=0.7), "line 1: rank is 0.7"),
        ("torchtitan", "a.jsonl", titan(step=1.5), "line 1: step is 1.5"),
        ("torchtitan", "a.jsonl", titan(value=9e15), "line 1: value (ms) is 9000000000000000.0"),
        ("megatron", "a.log", megatron(10**25), "line 1: the iteration is 1000"),
        ("megatron", "a.log", megatron(elapsed="9e18 |"), "line 1: the elapsed time is 9e+18"),
        ("megatron", "a.log", megatron(rest=" global batch size: 99999999999999999999 |"), "line 1: the batch size is 9999"),
        ("megatron", "a.log", megatron() + megatron(2, "12", rest=""), "line 2: an iteration without 'elapsed time"),
        ("mlperf", "a.log", ":::MLLOG " + NESTED, "line 1: not JSON"),
        ("mlperf", "a.log", mllog(9e15), "line 1: the step time is 9000000000000000.0"),
        ("mlperf", "a.log", mllog(1, step=1.5), "line 1: step is 1.5"),
        ("kineto", "a.json", '{"traceEvents": [], "x": ' + NESTED + "}", "not a PyTorch profiler trace"),
        ("kineto", "rank-99999999999.json", kineto("ProfilerStep#4"), "rank is 99999999999"),
        ("kineto", "a.json", kineto("ProfilerStep#1" + "0" * 30), "the number of a ProfilerStep is 1e+30"),
        ("kineto", "a.json", kineto("ProfilerStep#4", "ProfilerStep#4"), "a ProfilerStep#N occurs in it twice"),
        ("flight-recorder", "a_1", '{"entries": ' + NESTED + "}", "not JSON"),
        ("flight-recorder", "a_1", nested_dump(), "entry 1: maximum recursion depth exceeded"),
        ("flight-recorder", "a_20260101103000", dump(), "rank is 20260101103000"),
        ("flight-recorder", "a_1", dump(duration_ms=-5), "entry 1: -5 ms is negative"),
        ("flight-recorder", "a_1", dump(record_id=1.5), "entry 1: 1.5 is no whole number"),
        ("iteration-times", "a.csv", "step,seconds\n1,1\n2,1e300\n", "row 2: seconds is no positive number up to"),
        ("iteration-times", "a.csv", "step,seconds\n-1,1\n", "row 1: step is not between 0"),
        ("iteration-times", "a.csv", "step,seconds,tokens\n1,1,\n2,1,1e6\n", "row 2: tokens is no number: '1e6'"),
        ("iteration-times", "a.csv", "step,seconds,loss\n1,1,n/a\n", "row 1: loss is no number: 'n/a'"),
        ("iteration-times", "a.csv", "run,step,seconds\n" + "x" * 300 + ",1,1\n", "200 are allowed"),
    ],
)
def test_what_the_log_could_not_hold_is_refused_before_anything_is_written(
    tmp_path: Path, format: str, name: str, text: str | bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused = CliRunner().invoke(app, ["import", format, str(tmp_path / name), "--store", str(tmp_path / "store")])
    assert refused.exit_code == 2, refused.exception
    assert sentence in refused.output
    assert refused.output.count("\n") == 1
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("format", "columns", "sentence"),
    [
        ("iteration-times", {"step": [1.0, 2.5], "seconds": [1.0, 1.0]}, "row 2: step is no number: 2.5"),
        ("iteration-times", {"step": [1], "seconds": [timedelta(seconds=1)]}, "column seconds is of type Duration"),
        ("iteration-times", {"step": [[1]], "seconds": [1.0]}, "column step is of type List"),
        ("straggler-analysis", OPERATION | {"step": [date(2026, 1, 1)] * 2}, "column step is of type Date"),
        ("straggler-analysis", OPERATION | {"rank": [0.0, 0.2]}, "row 2: rank is no number: 0.2"),
        ("straggler-analysis", OPERATION | {"duration": [1.0, 1e15]}, "row 2: its start_ts or duration is not a finite"),
    ],
)
def test_a_column_is_not_bent_to_fit(tmp_path: Path, format: str, columns: dict[str, list[Any]], sentence: str) -> None:
    polars.DataFrame(columns).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(FormatError) as refused:
        bring_in(Store.locate(tmp_path / "store"), format, tmp_path / "t.parquet")
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", ["ops[1].parquet", "ops*.parquet"])
def test_a_file_is_read_and_no_other_that_its_name_would_match_as_a_pattern(tmp_path: Path, name: str) -> None:
    polars.DataFrame(OPERATION).write_parquet(tmp_path / "ops1.parquet")
    (tmp_path / "77").write_bytes(b"")
    polars.DataFrame(OPERATION | {"step": [77, 77]}).write_parquet(tmp_path / "77")
    (tmp_path / "77").rename(tmp_path / name)
    store = Store.locate(tmp_path / "store")
    (run,) = bring_in(store, "straggler-analysis", tmp_path / name)
    with open_store(store) as reader:
        assert reader.sql("select distinct iteration from spans where run = ?", [run.run]).rows() == [(77,)]
    (tmp_path / "t1.csv").write_text("step,seconds\n1,1\n")
    (tmp_path / "t[1].csv").write_text("step,seconds\n77,1\n")
    (run,) = bring_in(store, "iteration-times", tmp_path / "t[1].csv")
    with open_store(store) as reader:
        assert reader.sql("select iteration from iterations where run = ?", [run.run]).rows() == [(77,)]


def test_times_of_64_bits_keep_them(tmp_path: Path) -> None:
    rows = polars.DataFrame(OPERATION | {"start_ts": [1.7e9, 1.7e9 + 1e-3]})
    rows.write_parquet(tmp_path / "t.parquet")
    store = Store.locate(tmp_path / "store")
    (run,) = bring_in(store, "straggler-analysis", tmp_path / "t.parquet")
    with open_store(store) as reader:
        assert operations(reader, run.run)["start_ts"].to_list() == rows["start_ts"].to_list()
        exported = straggler_export.trace(reader, run.run)
    assert exported["start_ts"].to_list() == rows["start_ts"].to_list()
    assert exported.schema["duration"] == polars.Float32


@pytest.mark.slow
def test_a_damaged_parquet_file_is_told_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every third byte flipped: some of these end Polars' own reader in a panic."""
    polars.DataFrame(OPERATION).write_parquet(tmp_path / "t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    refused = []
    for place in range(4, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (tmp_path / "bad.parquet").write_bytes(damaged)
        try:
            straggler_analysis.read(tmp_path / "bad.parquet")
        except FormatError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert not any("\n" in sentence for sentence in refused)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("torchtitan", titan(value=1.0) + titan(value=2.0)),
        ("mlperf", mllog(0.001) + mllog(0.002)),
        ("megatron", megatron(3, "1.0 |") + megatron(3, "2.0 |")),
    ],
)
def test_an_iteration_reported_again_is_another_attempt_and_the_last_counts(tmp_path: Path, format: str, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    store = Store.locate(tmp_path / "store")
    (run,) = bring_in(store, format, tmp_path / "a.jsonl")
    with open_store(store) as reader:
        timed = reader.sql("select attempt, iteration_us from iterations").rows()
        kept = reader.sql(
            "select (payload->>'wall_us')::bigint from events where type = 'iteration_timed@1' order by seq"
        ).rows()
        repeated = reader.sql("select options->'facts'->>'told_again' from runs").rows()
    assert (timed, kept, repeated, run.iterations) == ([(1, 2_000)], [(1_000,), (2_000,)], [("1",)], 1)
    assert len(run.notes) == 1
    assert "reported more than once" in run.notes[0]


def test_windows_files_and_unicode_line_separators_within_a_text_are_read(tmp_path: Path) -> None:
    text = titan() + titan(step=2, log_type="HERE").replace("HERE", "a\u2028b")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (run,) = bring_in(Store.locate(tmp_path / "store"), "torchtitan", tmp_path / "a.jsonl")
    assert run.iterations == 2


def test_what_killed_imports_left_goes_with_the_next_import_unless_one_is_alive(tmp_path: Path) -> None:
    store = Store.locate(tmp_path / "store")
    for name in ("killed", "alive"):
        (store.root / "importing" / name / "spool").mkdir(parents=True)
    (tmp_path / "t.csv").write_text("step,seconds\n1,1\n")
    lock = hold(store.lock("import-alive"))
    assert lock is not None
    with lock:
        bring_in(store, "iteration-times", tmp_path / "t.csv")
    assert [folder.name for folder in (store.root / "importing").iterdir()] == ["alive"]


@pytest.mark.parametrize(("name", "sentence"), [("pipe", "not a pipe or a device"), ("bad\udcff.csv", "is not UTF-8")])
def test_what_cannot_be_named_or_read_twice_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    if name == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_text("step,seconds\n1,1\n")
    refused = CliRunner().invoke(app, ["import", "iteration-times", str(tmp_path / name), "--store", str(tmp_path / "store")])
    assert refused.exit_code == 2
    assert sentence in refused.output
    assert not (tmp_path / "store").exists()


def test_of_two_imports_that_both_found_the_name_free_the_later_is_refused(tmp_path: Path) -> None:
    store = Store.locate(tmp_path / "store")
    runs = []
    for name in ("a", "b"):
        file = tmp_path / f"{name}.csv"
        file.write_text(f"run,step,seconds\n{name},1,1\n")
        source = Source(run="x", format="iteration-times", path=file, sha256=fingerprint(file))
        runs.append((source, iteration_times.read(file)[0]))
    store_runs(store, runs[:1])
    with pytest.raises(FormatError, match=r"run x is in .* already and holds something else"):
        store_runs(store, runs[1:])
    with pytest.raises(StoreError, match="imported by another process meanwhile"):
        store_runs(store, runs[:1])


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("step,seconds\n1,1\n")
    store = Store.locate(tmp_path / "store")
    (run,) = bring_in(store, "iteration-times", tmp_path / "t.csv")
    out = tmp_path / "out.json"
    for there in (b"", b"precious"):
        if there:
            out.write_bytes(there)
        refused = CliRunner().invoke(app, ["export", "perfetto", run.run, "--out", str(out), "--store", str(store.root)])
        assert refused.exit_code == 2
        assert "has no spans to show" in refused.output
        assert (out.read_bytes() if there else not out.exists()) == (there or True)
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("format", "name", "data", "sentence"),
    [
        (
            "flight-recorder",
            "nccl_trace_rank_0",
            b"\x80\x04]r\xff\xff\xff\x1f.",
            "asks for room for 536,870,911 objects in 9 b",
        ),
        (
            "flight-recorder",
            "nccl_trace_rank_1",
            b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00.",
            "not a pickle of plain data",
        ),
        ("kineto", "rank-0.json.gz", gzip.compress(b" " * 3_000_000) * 100, "unpacks to more than 67 MB"),
        ("megatron", "log.txt", gzip.compress(b"\n" * 3_000_000) * 100, "unpacks to more than 67 MB"),
    ],
)
def test_a_small_file_that_asks_for_much_memory_is_refused(
    tmp_path: Path, format: str, name: str, data: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(data)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=sentence):
        bring_in(Store(tmp_path / "store"), format, tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 400_000
