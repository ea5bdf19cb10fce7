"""Importers of logs and dumps: what a newcomer's file becomes, and how each kind of damage is told."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import polars
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.datasets import dataset
from support.traces.flight_recorder_dumps import published
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.events import CONTROL, TELEMETRY, CollectiveRecorded, GroupRecorded, IterationTimed, SourceRecorded, Span
from unskew.collector.files.segment import telemetry_line
from unskew.collector.files.tail import decode_event
from unskew.collector.formats.importers import flight_recorder, iteration_times, kineto, mlperf, torchtitan
from unskew.collector.formats.importers.kineto_spans import Iterations, Step, TraceEvent, spans_of
from unskew.collector.formats.registry import FormatError, bring_in
from unskew.collector.locks import hold
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store


def test_no_event_names_a_field_like_the_envelope() -> None:
    for event in (*TELEMETRY, *CONTROL):
        names = {field.encode_name for field in msgspec.structs.fields(event)}
        assert not names & {"seq", "at_us", "stream", "version", "actor", "type"}, event


# --- iteration-times -------------------------------------------------------------------------------------------------


def test_a_table_of_many_runs_becomes_many_runs(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("run,step,seconds\na/x,10,1.5\nb,1,0.25\na/x,20,1.75\n")
    store = Store.locate(tmp_path / "store")
    runs = bring_in(store, "iteration-times", tmp_path / "t.csv", "jobs")
    assert [(one.run, one.iterations) for one in runs] == [("jobs-a-x", 2), ("jobs-b", 1)]
    with open_store(store) as reader:
        times = reader.sql(
            "select iteration, (payload->>'wall_us')::bigint from events where run = 'jobs-a-x' and type[:5] = 'itera'"
        )
    assert times.rows() == [(10, 1_500_000), (20, 1_750_000)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("step,seconds\n1,1\n2,fast\n", "row 2: seconds is no positive number"),
        ("step,seconds\n1,1\n2,-1\n", "row 2: seconds is no positive number"),
        ("step,seconds\n1,1\nx,1\n", "row 2: step is no number"),
        ("step,seconds\n1,1\n1,2\n", "row 2: the row before has the same step"),
        ("step,time\n1,1\n", "lacks the columns seconds"),
        ("step,seconds\n", "has no rows"),
    ],
)
def test_a_bad_table_is_told_by_its_row(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(FormatError, match=sentence):
        iteration_times.read(tmp_path / "t.csv")


def test_two_runs_whose_names_fall_together_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("run,step,seconds\na/b,1,1\na-b,1,1\n")
    with pytest.raises(FormatError, match="would both be named jobs-a-b"):
        bring_in(Store.locate(tmp_path / "store"), "iteration-times", tmp_path / "t.csv", "jobs")
    assert not list((tmp_path / "store").rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("iteration-times", "t.csv"), 0, "1 iteration, 1 event"),
        (("iteration-times", "none.csv"), 2, "there is no such file"),
        (("xes", "t.csv"), 2, "FORMAT xes is not known"),
        (("iteration-times", "t.csv", "--run", "a/b"), 2, "is not allowed"),
        (("iteration-times", "t.csv", "--run", "busy"), 1, "is being imported by another process"),
    ],
)
def test_the_command_says_what_it_did_or_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("step,seconds\n1,1\n")
    lock = hold(tmp_path / "store" / "locks" / "import-busy")
    assert lock is not None
    with lock:
        answer = CliRunner().invoke(app, ["import", *arguments, "--store", str(tmp_path / "store")])
    assert answer.exit_code == code, answer.output
    assert sentence in answer.output


# --- mlperf ----------------------------------------------------------------------------------------------------------


def mllog(key: str, value: Any, at_ms: int, **metadata: Any) -> str:
    entry = {"namespace": "", "time_ms": at_ms, "event_type": "POINT_IN_TIME", "key": key, "value": value, "metadata": metadata}
    return f"0: :::MLLOG {json.dumps(entry)}\n"


def test_an_mlperf_log_gives_steps_validation_and_facts(tmp_path: Path) -> None:
    (tmp_path / "r0.txt").write_text(
        mllog("global_batch_size", 1152, 1000)
        + "Epoch 0: loss 3\n"
        + mllog("tracked_stats", {"train_step_time": 5.5, "reduced_train_loss": 7.5}, 10_000, step=3)
        + mllog("tracked_stats", {"validation_step_time": 0.5}, 11_000)
        + mllog("run_stop", None, 12_000, status="success")
    )
    (run,) = mlperf.read(tmp_path)
    assert run.name == "r0"
    assert run.facts["global_batch_size"] == 1152
    assert run.facts["status"] == "success"
    events = list(run.events)
    assert IterationTimed(iteration=3, start_us=4_500_000, wall_us=5_500_000, loss=7.5) in events
    assert any(isinstance(event, SourceRecorded) and event.wall_us == 500_000 for event in events)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x\n0: :::MLLOG {nonsense\n", "line 2: not JSON"),
        (mllog("tracked_stats", {"train_step_time": "slow"}, 1), "line 1: the step time is 'slow'"),
        (":::MLLOG {}", "line 1: a :::MLLOG entry has time_ms"),
        ("quiet", "no line of this file has :::MLLOG"),
    ],
)
def test_a_bad_mlperf_line_is_told_by_its_number(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "r.log").write_text(text)
    with pytest.raises(FormatError, match=sentence):
        mlperf.read(tmp_path / "r.log")


# --- torchtitan ------------------------------------------------------------------------------------------------------


def titan(name: str, time_us: int, log_type: str = "event", **rest: Any) -> str:
    record = {"rank": 3, "source": "training", "step": 5, "log_type": log_type, "log_type_name": name, "time_us": time_us}
    return json.dumps(record | rest) + "\n"


def test_a_torchtitan_log_gives_steps_spans_and_scalars(tmp_path: Path) -> None:
    (tmp_path / "training.global_rank_3.jsonl").write_text(
        titan("lost_start_end", 90, value=0.05)  # its beginning is cut off
        + titan("step_start", 100)
        + titan("fetching_batch_start", 110)
        + titan("fetching_batch_end", 165, value=0.05)
        + titan("metric_value", 170, "instant", event_name="loss", value=2.5)
        + titan("structured_logger_start", 171, "instant")
        + titan("step_end", 1105, value=1.0)
    )
    (run,) = torchtitan.read(tmp_path)
    events = list(run.events)
    assert IterationTimed(rank=3, iteration=5, start_us=100, wall_us=1000, loss=2.5) in events
    spans = [(event.kind, event.start_us, event.wall_us) for event in events if isinstance(event, Span)]
    assert spans == [("data_wait", 110, 50)]
    recorded = {event.name: event for event in events if isinstance(event, SourceRecorded)}
    assert (recorded["lost_start"].start_us, recorded["lost_start"].wall_us) == (40, 50)
    assert recorded["loss"].value == 2.5
    assert recorded["structured_logger_start"].wall_us is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (titan("step_start", 1) + "{cut", "line 2: not JSON"),
        (titan("step_end", 1), r"line 1: value \(ms\) is None"),
        ('{"rank": 1}\n', "line 1: a record has log_type_name"),
    ],
)
def test_a_bad_torchtitan_record_is_told_by_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(FormatError, match=sentence):
        torchtitan.read(tmp_path)


# --- kineto ----------------------------------------------------------------------------------------------------------


def kineto_file(path: Path, rank: int | None, *, offset: float = 0.0) -> None:
    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts + offset, "dur": dur, "tid": 7, "args": args}

    trace = {
        "distributedInfo": {} if rank is None else {"rank": rank, "world_size": 2},
        "traceEvents": [
            event("user_annotation", "ProfilerStep#4", 100, 50),
            event("user_annotation", "ProfilerStep#5", 150, 50),
            event("cuda_runtime", "cudaLaunchKernel", 140, 1, correlation=9),
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 160, 20, correlation=9, device=0),
            event("kernel", "gemm", 171.4, 5),
            event("cpu_op", "aten::mm", 171, 5),
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        ],
    }
    path.write_bytes(gzip.compress(json.dumps(trace).encode()) if path.suffix == ".gz" else json.dumps(trace).encode())


def test_device_work_belongs_to_the_iteration_that_launched_it(tmp_path: Path) -> None:
    kineto_file(tmp_path / "a.json", 0)
    kineto_file(tmp_path / "worker_rank-1.json.gz", None, offset=1000)
    (run,) = kineto.read(tmp_path)
    events = list(run.events)
    spans = [(one.rank, one.kind, one.iteration, one.start_us) for one in events if isinstance(one, Span)]
    assert spans == [(0, "all_reduce", 4, 160), (1, "all_reduce", 4, 1160)]
    kernels = [(one.rank, one.name, one.iteration) for one in events if isinstance(one, SourceRecorded)]
    assert (0, "gemm", 5) in kernels
    assert len(kernels) == 4
    assert (run.ranks, run.iterations) == (2, 2)


def test_very_many_passes_of_a_rank_are_told_apart() -> None:
    """In minutes where each is held against all others."""
    n = 20_000
    names = (
        ("DistributedDataParallel.forward", 0, 40),
        ("gloo:broadcast", 2, 3),
        ("autograd::engine::evaluate_function: x", 50, 9),
    )
    events = [
        TraceEvent(ph="X", cat="user_annotation", name=name, ts=100.0 * i + at, dur=us)
        for i in range(n)
        for name, at, us in names
    ]
    found = [
        (one.kind, one.micro_batch, one.start_us, one.wall_us) for one in spans_of(0, events, Iterations([Step(0, 1e9, 0)], []))
    ]
    assert found == [
        chunk for i in range(n) for chunk in (("F", i, 100 * i + 5, 35), ("B", i, 100 * i + 50, 9))
    ]  # fmt: skip


def test_bad_traces_are_told(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"traceEvents": [\n{"ph": "X"},\n{"ph":')
    with pytest.raises(FormatError, match=r"cut.json.*: not a PyTorch profiler trace"):
        kineto.read(tmp_path / "cut.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"{}" * 1000)[:-9])
    with pytest.raises(FormatError, match=r"cut.json.gz cannot be read"):
        kineto.read(tmp_path / "cut.json.gz")
    (tmp_path / "host.json").write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1}]}')
    with pytest.raises(FormatError, match=r"host.json: no ProfilerStep#N"):
        kineto.read(tmp_path / "host.json")


@pytest.mark.parametrize(
    ("name", "steps", "ranks"), [("nccl_data", [4, 5, 6], 1), ("rank_not_found", [1009], 1), ("mi250_minitoy", [1, 2], 1)]
)
def test_real_profiler_traces_are_read(name: str, steps: list[int], ranks: int) -> None:
    (run,) = kineto.read(dataset("kineto-samples", f"{name}.json.gz"))
    events = list(run.events)
    assert [event.iteration for event in events if isinstance(event, IterationTimed)] == steps
    assert run.ranks == ranks
    if name == "nccl_data":  # a kernel of each of the 5 buckets in each of 3 steps
        assert sum(isinstance(event, Span) and event.kind == "all_reduce" for event in events) == 15


# --- flight recorder -------------------------------------------------------------------------------------------------

ENTRY = {
    "record_id": 7, "pg_id": 6, "process_group": ("43", "PIPELINE"), "collective_seq_id": 26, "p2p_seq_id": 0, "op_id": 12,
    "profiling_name": "nccl:all_reduce", "state": "scheduled", "is_p2p": False, "retired": False, "time_created_ns": 5_000,
    "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "duration_ms": 1.5, "timeout_ms": 1000,
    "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
}  # fmt: skip
DUMP = {
    "version": "2.5",
    "pg_config": {"43": {"name": "43", "desc": "PIPELINE", "ranks": "[0, 3]"}},
    "pg_status": {"6": {"last_enqueued_collective": 26, "last_started_collective": -1, "last_completed_collective": 25}},
    "entries": [ENTRY],
}


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_dump_is_read_and_says_who_is_missing(tmp_path: Path, form: str) -> None:
    (tmp_path / "nccl_trace_rank_3").write_bytes(pickle.dumps(DUMP) if form == "pickle" else json.dumps(DUMP).encode())
    (run,) = flight_recorder.read(tmp_path)
    group, status, entry = run.events
    assert group == GroupRecorded(rank=3, group="43", group_description="PIPELINE", members=(0, 3))
    assert status == GroupRecorded(rank=3, group="43", group_id="6", last_enqueued=26, last_started=-1, last_completed=25)
    assert isinstance(entry, CollectiveRecorded)
    assert (entry.rank, entry.group, entry.group_seq, entry.state) == (3, "43", 26, "scheduled")
    assert (entry.created_us, entry.wall_us, entry.timeout_us, entry.completed_us) == (5, 1_500, 1_000_000, None)
    assert run.facts["without_dump"] == [0]


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("fooled",)  # in the test's folder


@pytest.mark.parametrize(
    ("dump", "sentence"),
    [
        (pickle.dumps({"entries": [Trap()]}), r"a_1: not a pickle of plain data \(it names posix.mkdir"),
        (pickle.dumps(DUMP)[:-20], "a_1: not a pickle of plain data"),
        (pickle.dumps([1]), "a_1: a flight-recorder dump is a dictionary"),
        (pickle.dumps({"entries": [ENTRY, {**ENTRY, "state": "asleep"}]}), "a_1, entry 2: state is 'asleep'"),
        (b'{"entries": [{}]}', "a_1, entry 1: lacks 'process_group'"),
    ],
)
def test_a_dump_that_is_more_or_less_than_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dump: bytes, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_1").write_bytes(dump)
    with pytest.raises(FormatError, match=sentence):
        flight_recorder.read(tmp_path)
    assert not (tmp_path / "fooled").exists()


@pytest.mark.parametrize("case", ["gpu_error_1st", "lock_gil_1st"])
def test_the_published_dumps_come_back_entry_by_entry(tmp_path: Path, case: str) -> None:
    entries = published(case, tmp_path)
    store = Store.locate(tmp_path / "store")
    (stored,) = bring_in(store, "flight-recorder", tmp_path / "dumps", case)
    assert stored.ranks == 16
    with open_store(store) as reader:
        found = reader.sql(
            """select rank, (payload->>'record')::bigint as record_id, payload->>'group' as pg_name,
                   (payload->>'group_seq')::bigint as collective_seq_id, payload->>'op' as profiling_name,
                   (payload->>'created_us')::bigint as created_us
                from events where type = 'collective_recorded@1' order by rank, record_id"""
        )
    expected = entries.sort("rank", "record_id").select(
        "rank", "record_id", "pg_name", "collective_seq_id", "profiling_name",
        created_us=polars.col("time_created_ns") // 1000,
    )  # fmt: skip
    assert found.rows() == expected.rows()


# --- whatever a file holds -------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
SAMPLES: dict[str, tuple[Any, Any]] = {
    "mlperf": (mlperf.read, json.loads(mllog("tracked_stats", {"train_step_time": 5.5}, 10, step=3).partition("MLLOG")[2])),
    "torchtitan": (torchtitan.read, json.loads(titan("step_end", 5, value=1.0, task_name="t"))),
    "kineto": (
        kineto.read,
        {
            "distributedInfo": {"rank": 1, "world_size": 2},
            "deviceProperties": [{"name": "x"}],
            "traceEvents": [
                {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 1.0, "dur": 9.0, "tid": 1, "args": {}},
                {"ph": "X", "cat": "cuda_runtime", "name": "l", "ts": 1.0, "dur": 1.0, "args": {"correlation": 1}},
                {"ph": "X", "cat": "kernel", "name": "ncclAllReduce", "ts": 2.0, "dur": 1.0, "tid": 7,
                 "args": {"correlation": 1, "Collective name": "allreduce", "In msg nelems": 4, "dtype": "Float"}},
            ],
        },
    ),
    "kineto of ours": (
        kineto.read,
        {
            "distributedInfo": {"rank": 1},
            "unskew": "r",
            "traceEvents": [
                {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 1, "dur": 9, "tid": 1, "args": {}},
                {"ph": "X", "cat": "kernel", "name": "forward", "ts": 2, "dur": 3, "tid": 7, "args": {"unskew": {
                    "kind": "F", "iteration": 4, "micro_batch": 2, "first_layer": 0, "n_layers": 2, "peer": 3, "bytes": 8,
                    "group": "g", "compute_us": 3, "device": "cpu-1", "wall_us": 3}}},
            ],
        },
    ),
    "flight_recorder": (flight_recorder.read, json.loads(json.dumps(DUMP))),
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within `value`, its own first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), new=JSON)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_with_any_value_replaced_is_read_or_refused_in_a_sentence(
    tmp_path: Path, name: str, data: st.DataObject, new: Any
) -> None:
    read, sample = SAMPLES[name]
    changed = replaced(sample, data.draw(st.sampled_from(places(sample))), new)
    file = tmp_path / "nccl_trace_rank_3.jsonl"
    file.write_text((":::MLLOG " if name == "mlperf" else "") + json.dumps(changed) + "\n")
    refusal = ""
    try:
        (run,) = read(file)
    except FormatError as error:
        refusal = str(error)
    else:
        for event in run.events:
            assert decode_event(telemetry_line(0, 0, event)[:-1]) == event
    assert not refusal or (str(file) in refusal and "\n" not in refusal)
