"""What other tools ask of our traces: ByteDance's analyser, viewers of bars and arrows, HTA of profiler files."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars
import pytest
from support.datasets import dataset
from support.traces.pipeline_spans import logged
from support.traces.straggler_rules import broken
from support.training.runtime_runs import SMALL, train

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.pipeline.schedule import build_schedule, evaluate
from unskew.collector.events import Span
from unskew.collector.formats.imported import ImportedRun, Source, store_runs
from unskew.collector.formats.registry import take_out
from unskew.collector.paths import Store


@pytest.mark.parametrize("name", ["ops-ST.parquet", "ops-SE-windows12.parquet"])
def test_the_rules_hold_of_published_traces_within_the_error_of_their_clocks(name: str) -> None:
    rows = polars.read_parquet(dataset("bytedance-straggler", name))
    assert broken(rows.with_columns(polars.col("optype").cast(polars.Categorical)), tolerance=1e-3) == []


RUNS = {
    "a slow rank": ("slow:rank=1,factor=30.0,at=2", {}),
    "chunks of 100 ms": ("", {"layers": 8, "tokens": 1024}),
    "no data parallelism": ("", {"dp": 1}),
    "no pipeline": ("", {"pp": 1}),
    "several messages on their way": ("", {"link_us": 20_000}),
    "tensor-parallel groups": ("", {"tp": 2, "iterations": 3}),
    "two chunks per stage": ("", {"schedule": "interleaved", "layers": 8}),
    # Three whole iterations before it, as survivors may execute the one before the death to its end under the next plan.
    "a death, and uneven routes after it": ("kill:rank=3,at=4", {"iterations": 9}),
}


@pytest.mark.limit(120)
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_bytedances_analyser_takes_our_runs(tmp_path: Path, name: str) -> None:
    fault, options = RUNS[name]
    given: dict[str, Any] = {"mode": "observe", "iterations": 5} | options
    run = train(tmp_path / "store", *[fault] * bool(fault), base=SMALL, **given)
    take_out(run.store, "straggler-analysis", run.id, tmp_path / "trace.parquet")
    rows = polars.read_parquet(tmp_path / "trace.parquet")
    assert broken(rows) == []
    assert rows["step"].n_unique() >= 3
    if name == "chunks of 100 ms":
        assert rows.filter(polars.col("optype") == "forward-compute")["duration"].mean() > 0.1  # type: ignore[operator]


def stored(folder: Path, spans: Sequence[Span]) -> Store:
    """A store whose run `r` has these spans."""
    store = Store.locate(folder)
    source = Source(run="r", format="test", path=folder, sha256="")
    store_runs(store, [(source, ImportedRun(events=spans, ranks=4, iterations=1, facts={}))])
    return store


def pipeline(message_us: float, *, late_by_us: int = 0) -> list[Span]:
    """Two iterations of four stages; the clocks of odd ranks are behind by so much."""
    plan = uniform_plan(tp=1, pp=4, dp=1, n_layers=4, micro_batches=6)
    schedule = build_schedule(plan)
    us = np.random.default_rng(3).uniform(1, 40, len(schedule.order))
    found = []
    for iteration in range(2):
        for span in logged(evaluate(schedule, us, message_us), message_us, iteration, 10_000.0 * iteration):
            behind = late_by_us * (span.rank % 2)
            long = {"wall_us": 9_000 - span.start_us % 10_000} if span.kind == "send" else {}
            found.append(msgspec.structs.replace(span, start_us=span.start_us + 5_000 - behind, **long))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("message_us", "late_by_us"), [(0.0, 0), (0.4, 0), (25.0, 0), (3.0, 8), (0.0, -20)])
def test_arrows_begin_before_they_end_within_bars_that_nest_or_follow(
    tmp_path: Path, message_us: float, late_by_us: int
) -> None:
    """As Perfetto reads the format: ids pair up, both ends are in a bar, none before its beginning, no bar across another."""
    spans = pipeline(message_us, late_by_us=late_by_us)
    take_out(stored(tmp_path / "store", spans), "perfetto", "r", tmp_path / "p.json")
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    bars: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            bars[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["cat"]))
    assert sum(map(len, bars.values())) == len(spans)
    for track in bars.values():
        assert all(begin <= end for begin, end, _ in track)
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(track)))
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
    assert len(arrows) == sum(span.kind == "recv" for span in spans)
    for begin, end in arrows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["ts"] <= end["ts"]
        for event, kind in ((begin, "send"), (end, "recv")):
            on = [bar for bar in bars[event["pid"], event["tid"]] if bar[0] <= event["ts"] < bar[1]]
            assert [bar[2] for bar in on] == [kind]


def profiled(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The events of each rank's file, which must say its rank in the words that HTA looks for."""
    found = {}
    for file in sorted(folder.iterdir()):
        rank = re.search(r'"rank":\s+(\d+)', file.read_text().splitlines()[0])
        assert rank is not None
        found[int(rank[1])] = json.loads(file.read_text())["traceEvents"]
    return found


def test_profiler_files_have_what_hta_looks_up(tmp_path: Path) -> None:
    """Kernels on streams above 0, each with one launch on the host within a ProfilerStep; whole microseconds; NCCL by name."""
    spans = pipeline(25.0)
    take_out(stored(tmp_path / "store", spans), "kineto", "r", tmp_path / "k")
    files = profiled(tmp_path / "k")
    assert list(files) == [0, 1, 2, 3]
    for rank, events in files.items():
        assert all(isinstance(event["ts"], int) for event in events)
        complete = [event for event in events if event["ph"] == "X"]
        steps = {event["name"]: event for event in complete if event["name"].startswith("ProfilerStep#")}
        assert list(steps) == ["ProfilerStep#0", "ProfilerStep#1"]
        kernels = {event["args"]["correlation"]: event for event in complete if event["cat"] == "kernel"}
        launches = {event["args"]["correlation"]: event for event in complete if event["cat"] == "cuda_runtime"}
        assert kernels.keys() == launches.keys()
        assert min(kernels) > 0
        own = [span for span in spans if span.rank == rank]
        assert len(kernels) == len(own) == sum(event["cat"] == "kernel" for event in complete)
        assert sum(event["name"].startswith("nccl") for event in kernels.values()) == sum(span.kind not in "FB" for span in own)
        for correlation, kernel in kernels.items():
            assert kernel["args"]["stream"] > 0
            at = launches[correlation]["ts"]
            assert at <= kernel["ts"]
            step = steps[f"ProfilerStep#{kernel['args']['unskew']['iteration']}"]
            assert step["ts"] <= at < step["ts"] + step["dur"]


@pytest.mark.limit(120)
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what its own code makes of pandas is not ours
def test_hta_finds_who_computes_most(tmp_path: Path) -> None:
    """Where HTA is installed, with a pandas that it can work with."""
    hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed: pip install it to run this")
    if int(version("pandas").partition(".")[0]) > 2:
        pytest.skip("HolisticTraceAnalysis 0.5 needs pandas 2: pip install 'pandas<3' beside it to run this")
    run = train(tmp_path / "store", "slow:rank=1,factor=3.0,at=2", base=SMALL, mode="observe", iterations=8)
    take_out(run.store, "kineto", run.id, tmp_path / "k")
    analysis = hta.TraceAnalysis(trace_dir=str(tmp_path / "k"))
    breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    assert breakdown["compute_time_pctg"].idxmax() == 1
    assert list(analysis.get_comm_comp_overlap(visualize=False)["rank"]) == [0, 1, 2, 3]
