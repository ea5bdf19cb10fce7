"""Time lost where anything may happen: no part below zero, the parts are the whole, no scenario leaves the data."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from support.traces.foreign_traces import log_of, spans_of, trace_of

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.diagnosis.causes import LEAST_SHARE
from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.diagnosis.trace.lost import LostTime, time_lost
from unskew.analytics.diagnosis.trace.replay import makespan_us
from unskew.analytics.diagnosis.trace.scenarios import (
    balanced_lengths,
    equal_stages,
    even_replica,
    healthy_device,
    without_pattern,
    without_stalls,
)
from unskew.analytics.diagnosis.trace.section import TraceSection, infer, record, with_lengths, without_lengths
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import Party, Span, Verdict

ITERATIONS = 12


@some.composite
def sections(draw: some.DrawFn) -> TraceSection:
    """One to three stages, micro-batches from equal to very unequal; chunks held up, late ranks, slow collectives."""
    stages, replicas = draw(some.integers(1, 3)), draw(some.integers(1, 3))
    plan = uniform_plan(tp=1, pp=stages, dp=replicas, n_layers=6, micro_batches=replicas * draw(some.integers(1, 4)))
    random = np.random.default_rng(draw(some.integers(0, 1 << 16)))
    often, longest = draw(some.sampled_from([0.0, 0.003, 0.05])), draw(some.sampled_from([2.0, 40.0, 400.0]))
    late, reduce = draw(some.sampled_from([0.0, 3e4])), draw(some.sampled_from([0.0, 5e5]))
    spans = spans_of(
        plan,
        iterations=ITERATIONS,
        spread=draw(some.sampled_from([0.0, 0.2, 0.8])),
        noise=draw(some.sampled_from([0.001, 0.05])),
        factor=lambda _i, _chunk: random.uniform(1.0, longest) if random.random() < often else 1.0,
        gap_us=lambda _i, chunk: late if chunk.rank == 0 else 0.0,
        reduce_us=lambda _i: 1e3 + reduce * (random.random() < 0.3),
        seed=draw(some.integers(0, 1 << 16)),
    )
    return without_lengths(record(trace_of(spans)))


def cheapest(section: TraceSection, *, of_iteration: bool) -> Array:
    """Durations when every chunk takes what the cheapest of its kind took, in its iteration or in any."""
    work = section.parts.work_us.copy()
    for kind in section.kinds:
        mine = np.concatenate([members for (of, _), members in section.cells.items() if of == kind])
        work[mine] = work[mine].min(axis=0) if of_iteration else work[mine].min()
    return work


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(sections())
def test_no_part_is_below_zero_and_the_parts_are_the_whole(section: TraceSection) -> None:
    lost = time_lost(section)
    assert sum(lost.parts.values()) == pytest.approx(lost.measured_us - lost.ideal_us)
    assert {part: us.sum() for part, us in lost.parts.items() if us.sum() < -1.0} == {}


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(sections())
def test_no_scenario_makes_an_iteration_cheaper_than_its_cheapest_chunks(section: TraceSection) -> None:
    graph, work = section.recording.graph, section.parts.work_us
    own, any_ = (makespan_us(graph, cheapest(section, of_iteration=which)) for which in (True, False))
    for scenario in (balanced_lengths, equal_stages, without_pattern):
        assert (makespan_us(graph, scenario(section, work)) >= own - 1.0).all(), scenario.__name__
    assert (makespan_us(graph, without_stalls(section, work)) >= any_ - 1.0).all()
    for rank in section.ranks:
        assert (makespan_us(graph, healthy_device(section, work, rank)) >= any_ - 1.0).all()
    for replica in section.replicas:
        even = even_replica(section, work, replica, dict.fromkeys(section.kinds, 0.3))
        assert (makespan_us(graph, even) >= any_ - 1.0).all()


@pytest.mark.parametrize(("stages", "held_up", "spread"), [(2, 40.0, 0.01), (2, 400.0, 0.2), (3, 100.0, 0.1), (1, 40.0, 0.2)])
def test_a_chunk_that_was_held_up_bends_no_expectation_and_hides_no_verdict(stages: int, held_up: float, spread: float) -> None:
    """In one iteration one chunk takes many times as long, as if a machine had slept; stage 0 has most of the layers."""
    plan = uniform_plan(tp=1, pp=stages, dp=2, n_layers=6, micro_batches=8)

    def section(factor: float) -> TraceSection:
        spans = spans_of(plan, iterations=ITERATIONS, spread=spread,
                         factor=lambda i, chunk: factor if (i, chunk.kind, chunk.micro_batch, chunk.rank) == (5, "F", 3, 0) else
                         (2.5 if chunk.rank % stages == 0 and stages > 1 else 1.0))  # fmt: skip
        return without_lengths(record(trace_of(spans)))

    calm, ill = section(1.0), section(held_up)
    chunks = np.concatenate(list(ill.cells.values()))
    ratio = ill.expected_us[chunks] / calm.expected_us[chunks]
    assert np.median(ratio) == pytest.approx(1.0, abs=0.02)
    assert ratio.max() < 2.0
    before, after = time_lost(calm), time_lost(ill)
    for cause, us in before.causes.items():
        assert after.causes[cause].sum() == pytest.approx(us.sum(), abs=0.05 * before.measured_us.sum()), cause
    assert (after.causes["long_sequences"] > -0.05 * after.measured_us).all()
    assert after.located["stalls"][5] == pytest.approx((after.measured_us - before.measured_us)[5], rel=0.2)


def test_what_others_wait_in_their_passes_is_the_late_ones_doing() -> None:
    """Shards wait for each other in the middle of their passes: all last as long, and one of them computes all the time."""
    plan, first = uniform_plan(tp=1, pp=1, dp=2, n_layers=4, micro_batches=8), 15
    long = spans_of(plan, iterations=30, spread=0.1, factor=lambda i, chunk: 3.0 if chunk.kind == "F" and i >= first else 1.0)
    spans = [
        msgspec.structs.replace(span, compute_us=span.wall_us // 3, wait_dp_us=span.wall_us - span.wall_us // 3)
        if (span.kind, span.rank) == ("F", 0) and span.iteration >= first
        else span
        for span in long
    ]
    verdict = Verdict(
        verdict=1, cause="slow_device", culprits=(Party(kind="device", rank=1),), victims=(), speed={"F": 1 / 3},
        since_iteration=first, at_iteration=first + 5, confidence=1.0, sentence="", evidence={},
    )  # fmt: skip
    lost = time_lost(without_lengths(record(trace_of(spans))), [verdict])
    whole = sum(us.sum() for us in lost.parts.values())
    assert lost.causes["slow_device"].sum() > 0.8 * whole
    assert lost.located["stalls"].sum() == 0.0


@pytest.mark.parametrize("heavier", [1.0, 1.3])
def test_two_ranks_that_are_a_whole_stage_heal_to_their_own_pace_and_leave_it_what_it_is(heavier: float) -> None:
    """Each healed by the other, which was as slow, cost nothing, and their stage was said to be the costly one."""
    plan, first = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8), 15
    calm, ill = (
        spans_of(plan, iterations=40, spread=0.1,
                 factor=lambda i, chunk, slow=slow: (heavier * (slow if i >= first else 1.0)) if chunk.rank % 2 else 1.0)
        for slow in (1.0, 1.5)
    )  # fmt: skip
    verdicts = [
        Verdict(
            verdict=rank, cause="slow_device", culprits=(Party(kind="device", rank=rank),), victims=(),
            speed={"F": 0.67, "B": 0.67},
            since_iteration=first, at_iteration=first + 5, confidence=1.0, sentence="", evidence={},
        )
        for rank in (1, 3)
    ]  # fmt: skip
    before, after = (
        time_lost(without_lengths(record(trace_of(calm)))),
        time_lost(without_lengths(record(trace_of(ill))), verdicts),
    )
    longer = (after.measured_us - before.measured_us).sum()
    assert after.causes["slow_device"].sum() == pytest.approx(longer, rel=0.15)
    assert after.causes["stage_imbalance"].sum() == pytest.approx(
        before.causes["stage_imbalance"].sum(), abs=0.03 * after.measured_us.sum()
    )
    assert sum(after.parts.values()) == pytest.approx(after.measured_us - after.ideal_us)


@pytest.mark.parametrize("times_as_long", [1.0, 40.0, 0.01])
def test_one_chunk_does_not_hide_that_micro_batches_differ_in_length(times_as_long: float) -> None:
    """Of thousands in ByteDance's SE, one held up for as long as forty took the verdict on a quarter of the time away."""
    random = np.random.default_rng(5)
    times = 1e4 * random.lognormal(0, 0.4, 600) * random.lognormal(0, 0.02, (2, 2, 600))
    times[0, 1, 200] *= times_as_long
    correlation = infer(times, ("F", "B"), (0, 1)).correlation
    assert correlation is not None
    assert correlation > 0.98
    times[1] = 1e4 * random.lognormal(0, 0.4, (2, 600))
    assert (infer(times, ("F", "B"), (0, 1)).correlation or 0.0) < 0.3


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_chunks_held_up_at_random_are_no_long_sequences(share: float) -> None:
    """One stage, all lengths equal: a forward and a backward pass of one micro-batch that were held up, both, do by chance."""
    plan, random = uniform_plan(tp=1, pp=1, dp=8, n_layers=4, micro_batches=32), np.random.default_rng(1)
    held_up = spans_of(
        plan, iterations=60, spread=0.0, noise=0.02, factor=lambda _i, _chunk: 4.0 if random.random() < share else 1.0, seed=3
    )
    found = diagnose(log_of(held_up))
    assert found.verdicts == ()
    assert found.outcome != "well"
    times = 100 * random.normal(1, 0.02, (2, 2, 600)) * np.where(random.random((2, 2, 600)) < 0.02, 4, 1)
    assert abs(infer(times, ("F", "B"), (0, 1)).correlation or 0.0) < 0.3


def test_ranks_with_several_ranges_of_layers_are_inferred_range_by_range() -> None:
    """Interleaved stages; rank 3 is slow, and the range of layers that it holds first has heavier layers than the other."""
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8, schedule="interleaved")
    spans = spans_of(
        plan,
        iterations=30,
        factor=lambda i, chunk: (1.6 if chunk.rank == 3 and i >= 15 else 1.0) * (3.0 if chunk.first_layer < 2 else 1.0),
    )
    section = without_lengths(record(trace_of(spans)))
    chunks = np.concatenate(list(section.cells.values()))
    assert len(section.places) == 2 * len(section.cells)
    assert np.median(np.abs(section.expected_us[chunks] / section.parts.work_us[chunks] - 1)) < 0.03
    found = diagnose(log_of(spans))
    (slow,) = [verdict for verdict in found.verdicts if verdict.cause == "slow_device"]
    assert [party.rank for party in slow.culprits] == [3]
    assert found.time_lost_s["slow_device"] > 0.3 * sum(found.time_lost_s.values())


def test_a_workload_is_within_what_was_measured() -> None:
    random = np.random.default_rng(1)
    times = np.exp(random.normal(0, 0.02, (2, 2, 64))) * np.array([3.0, 6.0]).reshape(2, 1, 1)
    times[0, 0, 7] = 125.0
    expected = infer(times, ("F", "B"), (0, 1)).expected_us
    assert (expected <= times.max(axis=2, keepdims=True)).all()
    assert (expected >= times.min(axis=2, keepdims=True)).all()
    assert expected[0, 0, 7] < 4.0


PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8)
EXTRA_US = 60_000.0


def longer(spans: Sequence[Span]) -> pl.DataFrame:
    """What the source says of its iterations: that they last `EXTRA_US` longer than anything recorded in them."""
    rows = [(0, i, round(begin), round(end - begin + EXTRA_US)) for _, i, begin, end in trace_of(spans).iterations.iter_rows()]
    return pl.DataFrame(rows, schema=["plan_version", "iteration", "start_us", "wall_us"], orient="row")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("launch_delays", "ranks had all that they needed"),
        ("communication", "longer than the median of their like"),
        ("iteration_end", "behind the last recorded operation"),
        ("stalls", "something held them up"),
        ("pattern", "the same chunks of every iteration"),
    ],
)
def test_time_without_a_cause_is_located_and_said(place: str, sentence: str) -> None:
    """Each thing by itself costs `EXTRA_US` in every iteration or, collectives, thrice that in every third."""
    of_replica = [sorted(route.micro_batch for route in PLAN.routes if route.replica == replica) for replica in range(2)]
    edges = {("F", own[0]) for own in of_replica} | {("B", own[-1]) for own in of_replica}
    late = {(0, "F", of_replica[0][0])} if place == "launch_delays" else set()
    stall, always = {"stalls": 8.0}.get(place, 1.0), {"pattern": 1.9}.get(place, 1.0)
    spans = spans_of(
        PLAN,
        iterations=ITERATIONS,
        spread=0.02,
        gap_us=lambda _i, chunk: EXTRA_US if (chunk.rank, chunk.kind, chunk.micro_batch) in late else 0.0,
        factor=lambda i, chunk: (
            (stall if (chunk.rank, chunk.kind, chunk.micro_batch) == (1, "B", i % 4) else 1.0)
            * (always if chunk.first_layer == 0 and (chunk.kind, chunk.micro_batch) in edges else 1.0)
        ),
        reduce_us=lambda i: 1e3 + (3 * EXTRA_US if place == "communication" and i % 3 == 0 else 0.0),
    )
    found = diagnose(log_of(spans, longer(spans) if place == "iteration_end" else None))
    lost = found.time_lost_s
    assert max(lost, key=lambda part: lost[part]) == place
    if place not in {"stalls", "pattern"}:
        assert lost[place] == pytest.approx(4 * ITERATIONS * EXTRA_US / 1e6, rel=0.15)
    much = lost[place] >= LEAST_SHARE * sum(len(PLAN.ranks) * us / 1e6 for us in log_of(spans).iterations["iteration_us"])
    assert much == any(sentence in one for one in found.abstained), found.abstained
    assert much or place == "pattern"
    calm = diagnose(log_of(spans_of(PLAN, iterations=ITERATIONS, spread=0.02)))
    assert not any(sentence in one for one in calm.abstained)
    assert calm.time_lost_s.get(place, 0.0) < 0.2 * lost[place]


@pytest.mark.parametrize("emulated", [False, True])
def test_time_without_a_core_has_a_cause_as_far_as_the_rank_had_none(emulated: bool) -> None:
    """A chunk of rank 0 has no core for `EXTRA_US`: a device that computes takes longer for it; of one that goes on by itself
    what comes next begins so much later. Without a word of cores neither has a cause."""
    own = sorted(route.micro_batch for route in PLAN.routes if route.replica == 0)
    first, second = (0, "F", own[0]), (0, "F", own[1])
    usual_us = 1e4 * PLAN.role_of[0].n_layers
    spans = spans_of(
        PLAN,
        iterations=ITERATIONS,
        spread=0.02,
        gap_us=lambda _i, chunk: EXTRA_US * emulated * ((chunk.rank, chunk.kind, chunk.micro_batch) == second),
        factor=lambda _i, chunk: (
            1 + EXTRA_US / usual_us if not emulated and (chunk.rank, chunk.kind, chunk.micro_batch) == first else 1.0
        ),
    )

    def lost_s(coreless_us: int) -> dict[str, float]:
        reported = [
            msgspec.structs.replace(span, compute_us=span.wall_us - (0 if emulated else coreless_us), runq_us=coreless_us)
            if (span.rank, span.kind, span.micro_batch) == first
            else span
            for span in spans
        ]
        return diagnose(log_of(reported)).time_lost_s

    place, extra_s = "launch_delays" if emulated else "stalls", 4 * ITERATIONS * EXTRA_US / 1e6
    unreported, reported = lost_s(0), lost_s(round(EXTRA_US))
    assert unreported.get("no_core", 0.0) == 0.0
    assert unreported[place] > 0.2 * extra_s  # the pipeline hides a part of it
    assert reported["no_core"] == pytest.approx(unreported[place], rel=0.2)
    assert reported.get(place, 0.0) < 0.1 * extra_s


def test_a_plan_that_splits_backward_passes_is_explained_by_a_predictor_that_saw_them_whole() -> None:
    """As after a death under ReCycle, which goes over from 1f1b to zb-h1."""
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=6, micro_batches=3, schedule="zb-h1")
    cost = CostModel(chunks={kind: ChunkCost(layer_us=us, token_us=1.0, token2_us=0.0) for kind, us in (("F", 50), ("B", 80))})
    works = {iteration: [work_of([40])] * 3 for iteration in range(3)}
    section = with_lengths(record(trace_of(spans_of(plan, iterations=3))), works, cost, plan)
    expected = {o.kind: us for o, (us, *_) in zip(section.recording.graph.operations, section.expected_us, strict=True)}
    assert expected["B"] + expected["W"] == pytest.approx(3 * (80 + 40))


@pytest.mark.parametrize(
    ("measured", "replayed", "beside", "ideal", "words"),
    [
        (100, 109, 50, 60, ""),
        (0, 0, 0, 0, ""),
        (100, 145, 45, 90, "chunks of a rank overlap, and a replay"),
        (100, 145, 0, 90, "the trace contradicts itself: one after the other, what its ranks did takes 1.45 times"),
        (100, 98, 0, -1, "the trace contradicts itself: its parts add up to more than its time"),
    ],
)
def test_why_no_share_of_the_time_can_be_stated(
    measured: float, replayed: float, beside: float, ideal: float, words: str
) -> None:
    """A replay of 0.98 times the time contradicted it, and one of no time took "nan times as long"."""
    us = [np.array([float(one)]) for one in (measured, replayed, beside, ideal)]
    lost = LostTime(
        measured_us=us[0], replayed_us=us[1], beside_us=us[2], ideal_us=us[3], healthy_us=us[0], causes={}, located={},
        unexplained_us=us[0],
    )  # fmt: skip
    assert lost.why_unknown.startswith(words)
    assert bool(lost.why_unknown) == bool(words)
