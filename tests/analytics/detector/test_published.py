"""ResiHP's Detector as the one of a run: found at a change point, passed over when the batches explain it, validated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from support.training.adaptation_loop import Loop

from unskew.analytics.core.cost import Speeds, speed_of
from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.iteration import Chunk, CommittedIteration, IterationTelemetry
from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.options import SHARED_MACHINE, DetectorOptions
from unskew.analytics.detector.published.validation import comparable
from unskew.analytics.loop.adaptation import AdaptationStep
from unskew.analytics.loop.site import Site
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.collector.events import Probed, Span, Verdict, VerdictClosed

COST = profile("steady")
PLAN = uniform_plan(tp=1, pp=2, dp=3, n_layers=8, micro_batches=12)
PROFILED = msgspec.structs.replace(SHARED_MACHINE, method="resihp")
"""Its ranks cannot be probed, so the profile decides."""
PROBED = DetectorOptions(method="resihp")


def slowed(factor: float, begin: int, end: int = 1000) -> Callable[[int], float]:
    return lambda now: factor if begin <= now < end else 1.0


def product(rank: int, iteration: int, us: int) -> Span:
    """A rank multiplied its matrix."""
    return Span(
        kind="probe", device=f"d{rank}", rank=rank, iteration=iteration, plan_version=0, attempt=0, start_us=0, wall_us=us,
        compute_us=us,
    )  # fmt: skip


def iterations(
    rank_2: Callable[[int], float], n: int, *, longest: Callable[[int], int] = lambda _: 120
) -> Iterator[IterationTelemetry]:
    """Rank 2 takes `rank_2(iteration)` times as long; documents are of up to `longest` tokens."""
    random = np.random.default_rng(5)
    for now in range(n):
        most = longest(now)
        works = tuple(work_of([int(x) for x in random.integers(most // 2, most, 3)]) for _ in PLAN.routes)
        speeds: Speeds = {2: dict.fromkeys("FB", 1 / rank_2(now))}
        chunks = tuple(
            Chunk(
                hop.rank, kind, hop.n_layers, hop.first_layer > 0, works[route.micro_batch],
                COST.chunk_us(kind, works[route.micro_batch], hop.n_layers, has_head=hop.first_layer > 0,
                              speed=speed_of(speeds, hop.rank, kind)) * float(np.exp(random.normal(0, 0.01))),
            )
            for route in PLAN.routes for hop in route.hops for kind in "FB"
        )  # fmt: skip
        measured_us = predict_iteration(PLAN, works, COST, speeds).iteration_us * float(np.exp(random.normal(0, 0.01)))
        yield IterationTelemetry(
            committed=CommittedIteration(
                iteration=now, plan_version=0, chunks=chunks, works=works, measured_us=measured_us, log_complete=True
            ),
            probes=tuple(product(rank, 0, 1000) for rank in PLAN.ranks) if now == 0 else (),
        )


def follow(loop: Loop, of: Iterator[IterationTelemetry]) -> dict[int, AdaptationStep]:
    return {released.committed.iteration: loop.observe(released, PLAN) for released in of}


def loop_of(options: DetectorOptions) -> Loop:
    return Loop(Site(origin=PLAN, iterations=400, layer_bytes=(100_000,) * 8, bytes_per_us=200.0, detector=options))


def found(steps: dict[int, AdaptationStep]) -> list[Verdict | VerdictClosed]:
    return [one for step in steps.values() for one in step.events if isinstance(one, Verdict | VerdictClosed) and one.verdict]


def test_a_slow_rank_is_named_by_the_profile_and_acquitted_where_nobody_can_be_probed() -> None:
    loop = loop_of(PROFILED)
    named, closed = [one for one in found(follow(loop, iterations(slowed(3.0, 40, 80), 120))) if _of_device(one)]
    assert isinstance(named, Verdict)
    assert isinstance(closed, VerdictClosed)
    assert (named.culprits[0].rank, named.since_iteration) == (2, 40)
    assert 42 <= named.at_iteration <= 45
    assert named.speed["F"] == pytest.approx(1 / 3, rel=0.03)
    assert (named.evidence["test"], named.evidence["detector"]) == ("profile", "resihp")
    assert named.evidence["suspects"].keys() == {"2"}
    assert closed.verdict == named.verdict
    assert 80 <= closed.at_iteration <= 85
    assert loop.now.monitor.speeds == {}


def _of_device(one: Verdict | VerdictClosed) -> bool:
    return isinstance(one, VerdictClosed) or one.cause == "slow_device"


def test_the_scheduler_acts_on_its_verdicts() -> None:
    steps = follow(loop_of(PROFILED), iterations(slowed(1.8, 40), 60))
    (proposal,) = [step.proposal for step in steps.values() if step.proposal is not None][:1]
    assert proposal.plan.role_of[2].n_layers < 4


def test_long_documents_make_a_change_point_and_no_alarm() -> None:
    """From iteration 40 on documents are four times as long: the prediction knows it."""
    loop = loop_of(PROFILED)
    longer = iterations(slowed(1.0, 0), 70, longest=lambda now: 480 if now >= 40 else 120)
    watched = [one for one in found(follow(loop, longer)) if _of_device(one)]
    assert watched == []
    state = loop.now.monitor.detector
    assert len(state.changes.iterations) < 60, "benign iterations are deleted from the series"


def test_who_becomes_slower_still_is_named_anew() -> None:
    """The paper sends the severity with each confirmed failure."""
    loop = loop_of(PROFILED)
    of_device = [
        one for one in found(follow(loop, iterations(lambda now: 1.0 if now < 40 else 1.6 if now < 80 else 4.0, 100)))
        if isinstance(one, Verdict) and one.cause == "slow_device"
    ]  # fmt: skip
    assert [one.culprits[0].rank for one in of_device] == [2, 2]
    assert loop.now.monitor.speeds[2]["F"] == pytest.approx(1 / 4, rel=0.05)


def test_the_profile_says_nothing_of_who_is_alone_in_its_role() -> None:
    """As whose layers were taken from it, who is still slow: nobody is acquitted by that."""
    chunks = [one.committed.chunks for one in iterations(slowed(3.0, 0), 3)]
    taken = plan_from_partition(
        plan_version=1, n_layers=8, schedule="1f1b", members=[[0, 1], [2, 3], [4, 5]], layers=[[4, 4], [3, 5], [4, 4]],
        micro_batches=[4, 4, 4],
    )  # fmt: skip
    assert comparable(chunks, PLAN) == set(PLAN.ranks)
    assert comparable(chunks, taken) == {0, 1, 4, 5}


def test_a_slowdown_within_the_filter_is_not_found_by_design() -> None:
    steps = follow(loop_of(PROFILED), iterations(slowed(1.15, 40), 100))
    assert [one for one in found(steps) if _of_device(one)] == []
    ours = loop_of(msgspec.structs.replace(PROBED, method="unskew"))
    assert {
        one.culprits[0].rank for one in found(follow(ours, iterations(slowed(1.15, 40), 100))) if isinstance(one, Verdict)
    } == {2}


@pytest.mark.parametrize(("slowdown", "names"), [(3.0, {2}), (1.05, set())])
def test_suspects_are_validated_by_a_probe_where_one_can_be_made(slowdown: float, names: set[int]) -> None:
    """The profile suspects rank 2; its product decides."""
    loop, asked, verdicts, probed = loop_of(PROBED), tuple[int, ...](), list[Verdict](), list[Probed]()
    for released in iterations(slowed(3.0, 40), 60):
        spans = tuple(product(rank, released.committed.iteration, round(1000 * slowdown)) for rank in asked)
        step = loop.observe(msgspec.structs.replace(released, probes=released.probes or spans), PLAN)
        verdicts += [one for one in step.events if isinstance(one, Verdict) and one.cause == "slow_device"]
        probed += [one for one in step.events if isinstance(one, Probed)]
        asked = step.probe.ranks if step.probe is not None else ()
    assert [one.ranks for one in probed] == [(2,)], "asked once"
    assert {one.culprits[0].rank for one in verdicts} == names
    assert all(one.evidence["test"] == "probe" and one.since_iteration == 40 for one in verdicts)
    assert loop.now.monitor.detector.alarm is None


def test_an_alarm_that_nobody_validates_is_decided_by_the_profile() -> None:
    """As in mode observe, in which training is not held up."""
    steps = follow(loop_of(PROBED), iterations(slowed(3.0, 40), 60))
    verdicts = [one for one in found(steps) if isinstance(one, Verdict) and one.cause == "slow_device"]
    assert [one.culprits[0].rank for one in verdicts] == [2]
    assert verdicts[0].evidence["test"] == "profile"
    assert 52 <= verdicts[0].at_iteration <= 55
