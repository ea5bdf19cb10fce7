"""What a probe and a measurement on standby are compared with, in a whole log and in one whose beginning was pruned."""

from __future__ import annotations

import msgspec
import pytest

from unskew.analytics.loop.measurements import Measurements
from unskew.collector.events import Span, StandbyMeasured


def product(rank: int, iteration: int, us: int) -> Span:
    place = {"device": "d", "rank": rank, "plan_version": 0, "attempt": 0, "iteration": iteration}
    return Span(kind="probe", start_us=0, wall_us=us, compute_us=us, **place)  # type: ignore[arg-type]


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
