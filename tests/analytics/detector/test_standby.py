"""What readings of a rank on standby conclude, and what is then believed and said of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces.noisy_chunks import PP4_DP2, slow, train, watch

from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.packing import pack
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.detector import Detector
from unskew.analytics.detector.products import AGREE, StandbyReading, concluded, update_estimate
from unskew.analytics.scheduler.propose import propose
from unskew.analytics.scheduler.recovery import recover
from unskew.analytics.scheduler.state import SchedulerState
from unskew.collector.events import Verdict, VerdictClosed

LEAST = 1.15


def agreed(slowdowns: Sequence[float], estimated: float, episodes: int = 1) -> list[float]:
    readings = [StandbyReading(5 * number, slowdown) for number, slowdown in enumerate(slowdowns)]
    return [reading.slowdown for reading in concluded(readings, estimated, episodes, LEAST)]


@pytest.mark.parametrize(
    ("slowdowns", "estimated", "episodes", "conclusion"),
    [
        ([1.0], 6.0, 1, []),
        ([6.0, 1.0], 6.0, 1, []),
        ([6.0, 1.0, 1.1], 6.0, 1, [1.0, 1.1]),
        ([1.0, 1.0], 6.0, 2, []),
        ([1.0, 1.0, 1.0, 1.0], 6.0, 2, [1.0] * 4),
        ([1.0, 1.0, 1.2, 1.0, 1.0], 6.0, 2, []),
        ([6.0, 5.9], 6.0, 1, []),
        ([6.0, 2.0], 6.0, 1, []),
        ([2.0, 2.1], 6.0, 1, [2.0, 2.1]),
        ([8.0, 9.0], 6.0, 1, [8.0, 9.0]),
        ([1.0, 1.0], 1.0, 0, []),
        ([3.0, 3.0], 1.0, 0, [3.0, 3.0]),
    ],
)
def test_readings_conclude_what_they_agree_on(
    slowdowns: list[float], estimated: float, episodes: int, conclusion: list[float]
) -> None:
    assert agreed(slowdowns, estimated, episodes) == conclusion


@given(st.lists(st.floats(0.5, 20), max_size=70), st.floats(1, 20), st.integers(0, 9))
def test_one_reading_never_decides_and_what_is_believed_is_not_concluded_again(
    slowdowns: list[float], estimated: float, episodes: int
) -> None:
    found = agreed(slowdowns, estimated, episodes)
    assert found == [] or (len(found) >= AGREE and found == slowdowns[-len(found) :])
    assert all(slowdown < LEAST for slowdown in found) or all(slowdown >= LEAST for slowdown in found)
    assert not found or not min(found) < estimated < max(found)
    assert not found or agreed(slowdowns, sorted(found)[0] if min(found) >= LEAST else 1.0, episodes) == []


def test_a_product_that_was_never_slow_closes_no_verdict_on_backward_passes() -> None:
    """The product is a forward pass: a rank that is slow in backward passes was acquitted and given its work back, twice."""
    detector = Detector()
    (verdict,) = watch(detector, train(PP4_DP2, slow(1, 3.0, at=15, kinds="B"), seed=3, n=30), PP4_DP2)
    assert isinstance(verdict, Verdict)
    assert verdict.speed.keys() == {"B"}
    healthy = [StandbyReading(at, 1.0) for at in (35, 40, 45)]
    assert update_estimate(detector.state, 1, healthy, 46, detector.options) == (detector.state, ())
    seen = [StandbyReading(31, 3.0), *healthy]
    _, (closed,) = update_estimate(detector.state, 1, seen, 46, detector.options)
    assert isinstance(closed, VerdictClosed)


def test_the_scheduler_leaves_a_rank_out_keeps_it_out_and_takes_it_back() -> None:
    origin = uniform_plan(tp=1, pp=4, dp=2, n_layers=8, micro_batches=16)
    lengths = [16 + 37 * number % 200 for number in range(4000)]
    packed = [pack(lengths, seed=0, iteration=i, micro_batches=16, max_tokens=256) for i in range(10)]
    batches = tuple(tuple(work_of([lengths[document] for document in m]) for m in iteration) for iteration in packed)

    def state(*dead: int, **slow: float) -> SchedulerState:
        return SchedulerState(
            origin=origin,
            alive=frozenset(origin.ranks) - set(dead),
            speeds={int(rank[1:]): {"F": speed, "B": speed} for rank, speed in slow.items()},
            cost=profile("steady"),
            batches=batches,
            iterations=1000,
            layer_bytes=(2_000_000,) * 8,
            bytes_per_us=1000.0,
            regroup_us=200_000.0,
        )

    left, reason = propose(0, origin, state(r2=1 / 6))
    assert left is not None, reason
    assert 2 not in left.plan.ranks
    assert left.change.startswith("rank 0: 2 -> 3 layers; ")
    assert propose(20, left.plan, state(r2=1 / 6))[0] is None
    back, reason = propose(40, left.plan, state())
    assert back is not None, reason
    assert back.plan.digest == origin.digest
    # Beside a death a rank that is half as fast is worth a place, though its peers have its work already.
    rerouted = recover(left.plan, {6}, left.plan.plan_version + 1)
    spare, reason = propose(60, rerouted, state(6, r2=0.55))
    assert spare is not None, reason
    assert 2 in spare.plan.ranks


def test_the_last_spare_copy_is_worth_more_than_speed() -> None:
    origin = uniform_plan(tp=1, pp=1, dp=2, n_layers=4, micro_batches=16)
    work = tuple(work_of([128]) for _ in range(16))
    state = SchedulerState(
        origin=origin,
        alive=frozenset({0, 1}),
        speeds={1: {"F": 0.04, "B": 0.04}},
        cost=profile("steady"),
        batches=(work,) * 10,
        iterations=1000,
        layer_bytes=(2_000_000,) * 4,
        bytes_per_us=1000.0,
        regroup_us=200_000.0,
    )
    proposal, reason = propose(0, origin, state)
    assert proposal is not None, reason
    assert proposal.plan.ranks == (0, 1)
    assert proposal.plan.executors == {0}
