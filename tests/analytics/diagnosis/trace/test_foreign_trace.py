"""A foreign trace with forward and backward times per micro-batch reaches the chunk diagnosis, whichever importer wrote it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import polars as pl
import pytest
from support.traces.foreign_traces import spans_of, trace_of
from typer.testing import CliRunner

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.diagnosis.trace.model import from_spans
from unskew.analytics.diagnosis.trace.replay import GraphError
from unskew.analytics.diagnosis.trace.section import record
from unskew.cli import app
from unskew.collector.events import IterationTimed, Span
from unskew.collector.formats import registry
from unskew.collector.formats.imported import ImportedRun
from unskew.collector.paths import Store

SLOW, SINCE, ITERATIONS, FACTOR = 3, 20, 40, 1.6


def traced(plan: Plan, *, slow: float = 1.0, iterations: int = ITERATIONS) -> list[Span]:
    """Rank `SLOW` takes `slow` times as long from `SINCE` on."""
    return spans_of(plan, iterations=iterations, factor=lambda i, chunk: slow if chunk.rank == SLOW and i >= SINCE else 1.0)


def without_layers(spans: Sequence[Span]) -> list[Span]:
    return [msgspec.structs.replace(span, first_layer=None, n_layers=None) for span in spans]


PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8)


def diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: Sequence[Span]) -> dict[str, object]:
    """What `unskew diagnose` says of a run that another importer wrote."""
    ends = {span.iteration: span.start_us + span.wall_us for span in spans if span.kind == "optimizer"}
    begins = {i: min(span.start_us for span in spans if span.iteration == i) for i in ends}
    times = [IterationTimed(iteration=i, rank=0, start_us=begins[i], wall_us=ends[i] - begins[i]) for i in ends]
    events = [*spans, *times]
    run = ImportedRun(events=events, ranks=4, iterations=len(ends), facts={})
    monkeypatch.setattr(registry, "IMPORTERS", ("other",))
    monkeypatch.setattr(registry, "_module", lambda _side, _format: SimpleNamespace(read=lambda _path: [run]))
    (tmp_path / "source").write_text("a trace")
    store = Store(tmp_path / "store")
    registry.bring_in(store, "other", tmp_path / "source", "foreign")
    done = CliRunner().invoke(app, ["diagnose", "foreign", "--store", str(store.root), "--json", str(tmp_path / "d.json")])
    assert done.exit_code == 0, done.output
    (found,) = json.loads((tmp_path / "d.json").read_text())["runs"]
    return dict(found)


@pytest.mark.parametrize("layers", [True, False])
def test_ranks_are_placed_by_their_messages_and_their_layers_or_their_order(layers: bool) -> None:
    plan = uniform_plan(tp=1, pp=3, dp=2, n_layers=6, micro_batches=8)
    spans = traced(plan, iterations=3)
    trace = trace_of(spans if layers else without_layers(spans))
    places = {
        rank: (replica, stage) for rank, replica, stage in trace.operations.select("rank", "replica", "stage").iter_rows()
    }
    assert places == {role.rank: (role.replica, role.stage) for role in plan.roles}
    assert not any(operation.kind == "vote" for operation in record(trace).graph.operations)


def test_a_slow_device_is_named_and_what_it_costs_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnosed(tmp_path, monkeypatch, without_layers(traced(PLAN, slow=FACTOR)))
    assert found["observability"] == "chunks"
    (slow,) = [verdict for verdict in found["verdicts"] if verdict["cause"] == "slow_device"]
    assert [party["rank"] for party in slow["culprits"]] == [SLOW]
    assert abs(slow["since_iteration"] - SINCE) <= 2
    assert slow["speed"]["B"] == pytest.approx(1 / FACTOR, abs=0.05)
    lost = found["time_lost_s"]
    assert lost["slow_device"] > 0.4 * sum(lost.values())
    assert lost["long_sequences"] > 0


@pytest.mark.parametrize(("messages", "causes"), [(True, ["long_sequences"]), (False, [])])
def test_a_healthy_trace_of_uneven_micro_batches_names_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: bool, causes: list[str]
) -> None:
    spans = [span for span in traced(PLAN) if messages or span.kind not in {"send", "recv"}]
    found = diagnosed(tmp_path, monkeypatch, spans)
    assert [verdict["cause"] for verdict in found["verdicts"]] == causes


def test_what_does_not_tell_what_waits_for_what_is_refused_in_a_sentence() -> None:
    silent = [span for span in traced(PLAN, iterations=3) if span.kind not in {"send", "recv"}]
    with pytest.raises(GraphError, match="several stages and no messages between them"):
        record(trace_of(silent))
    looped = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8, schedule="interleaved")
    with pytest.raises(GraphError, match="a micro-batch more than once in an iteration, and its layers are not recorded"):
        record(trace_of(without_layers(traced(looped, iterations=3))))
    assert record(trace_of(traced(looped, iterations=3))).iterations == (0, 1, 2)
    begun = trace_of(traced(PLAN, iterations=1))
    with pytest.raises(GraphError, match="no iteration has its chunks in the log"):  # a run that failed in its first one
        record(msgspec.structs.replace(begun, iterations=begun.iterations.clear()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "sentence"), [(False, "each rank is taken for a replica"), (True, "no messages between them")]
)
def test_without_messages_a_weaker_analysis_still_names_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: bool, sentence: str
) -> None:
    silent = [span for span in traced(PLAN, slow=FACTOR) if span.kind not in {"send", "recv"}]
    found = diagnosed(tmp_path, monkeypatch, silent if layers else without_layers(silent))
    assert layers == (found["time_lost_s"] == {})
    assert any(sentence in one for one in found["abstained"])
    assert [p["rank"] for v in found["verdicts"] if v["cause"] == "slow_device" for p in v["culprits"]] == [SLOW]


@pytest.mark.slow
def test_an_iteration_of_very_many_collectives_is_taken_apart() -> None:
    """In minutes where each is held against all others of its rank."""
    n = 30_000
    calls = pl.DataFrame({"start_us": [10 * i for i in range(1, n + 1)], "wall_us": [4] * n, "kind": ["all_gather"] * n})
    ends = pl.DataFrame({"start_us": [0, 10 * n + 5], "wall_us": [3, 3], "kind": ["F", "B"], "micro_batch": [0, 0]})
    both = pl.concat([calls, ends, calls.select(pl.col("start_us") + 5, wall_us=1, kind=pl.lit("gc"))], how="diagonal_relaxed")
    spans = pl.concat([both.with_columns(rank=pl.lit(rank), start_us=pl.col("start_us") + rank) for rank in (0, 1)])
    recorded = record(from_spans(spans.with_columns(plan_version=0, iteration=0, group_seq=None), pl.DataFrame(), {}))
    graph = recorded.graph
    together = [tuple(graph.operations[i].rank for i in group) for group in graph.groups if len(group) > 1]
    assert together == [(0, 1)] * n
    assert all(recorded.start_us[one, 0] + 1 == recorded.start_us[other, 0] for one, other in graph.groups[1 : n + 1])
    assert recorded.pauses_us["gc_pause"].sum() == 2 * n
