"""Importers of tables and logs: what a newcomer's file becomes, how each kind of damage is told; and any value in any file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.traces.flight_recorder_dumps import DUMP
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.events import CONTROL, TELEMETRY, IterationTimed, SourceRecorded, Span
from unskew.collector.files.segment import telemetry_line
from unskew.collector.files.tail import decode_event
from unskew.collector.formats.importers import flight_recorder, iteration_times, kineto, mlperf, torchtitan
from unskew.collector.formats.registry import FormatError, bring_in
from unskew.collector.locks import hold
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store


def test_no_event_names_a_field_like_the_envelope() -> None:
    for event in (*TELEMETRY, *CONTROL):
        names = {field.encode_name for field in msgspec.structs.fields(event)}
        assert not names & {"seq", "at_us", "stream", "version", "actor", "type"}, event


def test_parts_that_add_up_to_more_than_their_step_are_told_with_the_first(tmp_path: Path) -> None:
    """They were taken in without a word. What is rounded, or waited before the step, is none."""
    rows = "0,0,1.0,0.3,0.5,0.205\n0,1,1.0,5.0,0.5,0.5\n1,0,1.0,0.0,0.9,0.8\n1,1,1.0,0.0,1.5,\n"
    (tmp_path / "t.csv").write_text(f"step,rank,seconds,data_wait,forward,backward\n{rows}")
    (run,) = iteration_times.read(tmp_path / "t.csv")
    (note,) = run.notes
    assert "forward, backward add up to 1.7 s in iteration 1 of rank 0, which took 1 s" in note
    assert "(2 in all)" in note


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
        ("step,rank,seconds,forward\n1,0,0.05,20\n", "row 1: forward is longer than the step, as in most rows"),
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
                    "group": "g", "compute_us": 3, "device": "cpu-1", "lengths": [5, 3], "wall_us": 3}}},
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


@pytest.mark.slow
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
