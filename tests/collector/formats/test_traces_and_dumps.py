"""Importers of profiler traces and flight-recorder dumps: what a newcomer's file becomes, how each kind of damage is told."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import polars
import pytest
from support.datasets import dataset
from support.traces.flight_recorder_dumps import DUMP, ENTRY, published

from unskew.collector.events import CollectiveRecorded, GroupRecorded, IterationTimed, SourceRecorded, Span
from unskew.collector.formats.importers import flight_recorder, kineto
from unskew.collector.formats.importers.kineto_spans import Iterations, Step, TraceEvent, spans_of
from unskew.collector.formats.registry import FormatError, bring_in
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store

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


@pytest.mark.parametrize(
    ("recorded", "counted"),
    [
        (("kernel", "gpu_user_annotation", "user_annotation"), "kernel"),
        (("gpu_user_annotation", "user_annotation"), "gpu_user_annotation"),
        (("user_annotation",), "user_annotation"),
    ],
)
def test_a_collective_is_told_once_by_its_kernel_else_by_what_is_nearest_to_it(recorded: tuple[str, ...], counted: str) -> None:
    starts = {"kernel": 130.0, "gpu_user_annotation": 120.0, "user_annotation": 110.0}
    names = {"kernel": "ncclDevKernel_AllReduce_Sum_f32_RING_LL"}
    events = [TraceEvent(ph="X", cat=cat, name=names.get(cat, "nccl:all_reduce"), ts=starts[cat], dur=9) for cat in recorded]
    events.append(TraceEvent(ph="X", cat="gpu_memcpy", name="Memcpy", ts=150, dur=1))
    found = [(one.kind, one.start_us) for one in spans_of(0, events, Iterations([Step(100, 100, 0)], []))]
    assert found == [("all_reduce", starts[counted])]


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


# --- flight recorder --------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
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
