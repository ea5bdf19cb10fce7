"""What probes and measurements on standby are compared with; and who was slow already when the run began, alone in its role."""

from __future__ import annotations

import msgspec
import pytest
from support.training.adaptation_loop import Loop, Telemetry, events, follow, slow, train

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.loop.detection_limit import LimitState
from unskew.analytics.loop.measurements import Measurements
from unskew.analytics.loop.site import Site
from unskew.collector.events import DetectionLimit, Span, StandbyMeasured, Verdict


def product(rank: int, iteration: int, us: int) -> Span:
    place = {"device": "d", "rank": rank, "plan_version": 0, "attempt": 0, "iteration": iteration}
    return Span(kind="probe", start_us=0, wall_us=us, compute_us=us, **place)  # type: ignore[arg-type]


PLAN = uniform_plan(tp=1, pp=4, dp=1, n_layers=12, micro_batches=8)
WITHOUT = uniform_plan(tp=1, pp=3, dp=1, n_layers=12, micro_batches=8).renumbered(1)
SLOW = slow(3, 1 / 3, at=0)
ON_STANDBY = StandbyMeasured(rank=1, iteration=40, product_us=2_500, slowdown=2.4, watermark=41)


def test_what_was_measured_when_the_run_began_is_healthy() -> None:
    healthy, nothing = Measurements().probed([product(rank, 0, 1_000) for rank in (0, 1)])
    assert nothing is None
    again, found = healthy.probed([product(1, 30, 1_700)])
    assert found is not None
    assert found.slowdowns == {1: 1.7}
    measurements, measured = again.on_standby(msgspec.structs.replace(ON_STANDBY, slowdown=None))
    assert measured.slowdown == 2.5
    assert [reading.slowdown for reading in measurements.readings[1]] == [2.5]


def test_without_the_beginning_no_probe_counts_and_on_standby_what_was_recorded() -> None:
    first, nothing = Measurements().probed([product(1, 30, 1_700)])
    later, still_nothing = first.probed([product(1, 80, 3_400)])
    assert (nothing, still_nothing, later) == (None, None, Measurements())
    measurements, measured = later.on_standby(ON_STANDBY)
    assert measured == ON_STANDBY
    assert [reading.slowdown for reading in measurements.readings[1]] == [2.4]
    live = msgspec.structs.replace(ON_STANDBY, slowdown=None)
    assert later.on_standby(live) == (later, live)


def test_who_was_slow_when_the_run_began_is_compared_with_healthy_devices_of_its_class() -> None:
    """Its own product made a device six times slower healthy on standby, again and again. A class of its own is no evidence."""
    products = [product(rank, 0, us) for rank, us in enumerate((1_000, 6_000, 1_100, 5_000))]
    measurements, _ = Measurements().probed(products, classes=[(0, 1, 2), (3,)], slow=1.15)
    assert measurements.references == {0: 1_000, 1: 1_050, 2: 1_100, 3: 5_000}
    assert measurements.suspected_first == {1: pytest.approx(6_000 / 1_050)}
    later, found = measurements.probed([product(1, 12, 6_300)])
    assert found is not None
    assert (found.slowdowns, later.suspected_first) == ({1: 6.0}, {})


def test_a_resumed_run_is_measured_against_its_own_beginning() -> None:
    measurements, _ = Measurements().probed([product(1, 30, 1_000)], first=30)
    assert measurements.on_standby(ON_STANDBY)[1].slowdown == 2.5


def loop_of(first: int = 0, **options: object) -> Loop:
    detector = DetectorOptions(**options)  # type: ignore[arg-type]
    return Loop(Site(origin=PLAN, iterations=400, classes={"": (0, 1, 2, 3)}, first_iteration=first, detector=detector))


def begun(n: int, first: int = 0) -> Telemetry:
    """Rank 3 is slow, and its product takes three times as long."""
    products = tuple(product(rank, first, us) for rank, us in enumerate((1_000, 1_000, 1_000, 3_000)))
    for released in train(SLOW, n, plan=PLAN, first=first):
        yield released if released.committed.iteration > first else msgspec.structs.replace(released, probes=products)


def test_only_a_suspect_that_executes_is_probed() -> None:
    """On standby it measures itself: a probe of it never came and was asked for every four iterations for ever."""
    loop = loop_of()
    probes = [step.probe.ranks for step in follow(loop, begun(20), PLAN).values() if step.probe]
    assert len(probes) > 1
    assert {*probes} == {(3,)}
    for released in train(SLOW, 20, plan=WITHOUT, first=20):
        loop.now, step = loop.now.observe(released, WITHOUT, frozenset(range(4)))
        assert step.probe is None


def test_another_detector_gets_none_of_our_probes() -> None:
    steps = follow(loop_of(method="resihp"), begun(20), PLAN)
    assert not any(step.probe for step in steps.values())


@pytest.mark.parametrize("first", [0, 30])
def test_while_no_probe_has_told_no_device_is_called_well(first: int) -> None:
    loop = loop_of(first)
    steps = follow(loop, begun(40, first), PLAN)
    assert events(steps, Verdict) == []
    limits = events(steps, DetectionLimit)
    assert limits
    for limit in limits:
        assert (limit.smallest_slowdown, limit.of_devices) == (None, None)
        assert limit.why.startswith(f"stage 3 is dear or rank 3 is slow since iteration {first}: one product was long")


def test_what_is_seen_again_at_the_end_of_a_run_is_said() -> None:
    blind = DetectionLimit(at_iteration=1, smallest_slowdown=None, why="too young")
    again = DetectionLimit(at_iteration=9, smallest_slowdown=1.15, why="")
    loop = msgspec.structs.replace(loop_of().now, limit=LimitState(logged=blind, seen_again=3, regained=again))
    assert loop.finished() == [again]
