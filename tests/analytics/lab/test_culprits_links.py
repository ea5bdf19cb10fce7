"""Slow links one iteration after the other: who is named, when, and who is not."""

from __future__ import annotations

import numpy as np
import pytest

from unskew.analytics.core.iteration import Transfer
from unskew.analytics.detector.links import LinkChange, watch

LINKS = [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]
ITERATION_US = 400_000.0


def changes(slowness, *, iterations: int = 80, usual_us: float = 4_000.0, seed: int = 0) -> list[tuple[int, LinkChange]]:
    """Feed 8 messages a link and iteration, log-normal with sd 30 %; `slowness(link, iteration)` multiplies."""
    random = np.random.default_rng(seed)
    tracks, found = {}, []
    for iteration in range(iterations):
        transfers = [
            Transfer(a, b, usual_us * slowness((a, b), iteration) * float(np.exp(random.normal(0, 0.3))))
            for a, b in LINKS
            for _ in range(8)
        ]
        tracks, now = watch(tracks, iteration, ITERATION_US, transfers)
        found += [(iteration, change) for change in now]
    return found


def test_a_slow_link_is_named_soon_and_again_when_it_is_well() -> None:
    for seed in range(10):
        (at, slow), (healed_at, healed) = changes(lambda link, i: 3.0 if link == (1, 2) and 40 <= i < 60 else 1.0, seed=seed)
        assert (slow.link, slow.slow, healed.link, healed.slow) == ((1, 2), True, (1, 2), False)
        assert 40 <= at <= 46
        assert abs(slow.since - 40) <= 2
        assert slow.ratio == pytest.approx(3.0, rel=0.2)
        assert slow.lost_share == pytest.approx(8 * 4_000 * 2 / ITERATION_US, rel=0.3)
        assert 60 <= healed_at <= 68


@pytest.mark.parametrize(
    "slowness",
    [
        lambda _link, _i: 1.0,
        lambda link, i: 20.0 if link == (1, 2) and i % 25 == 20 else 1.0,
        lambda _link, i: 3.0 if i >= 40 else 1.0,
    ],
    ids=["healthy", "single iterations", "all links alike"],
)
def test_nobody_is_named(slowness) -> None:
    assert [changes(slowness, seed=seed) for seed in range(10)] == [[]] * 10


def test_a_link_that_carries_little_is_not_named() -> None:
    assert changes(lambda link, i: 3.0 if link == (1, 2) and i >= 40 else 1.0, usual_us=50.0) == []
