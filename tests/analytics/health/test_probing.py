"""When suspects are probed, over which links in which order, and what is read from the spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unskew.analytics.health.probing import Probe, ProbeOptions, measured, passes, references, wanted
from unskew.collector.events import Span

OPTIONS = ProbeOptions()


@given(st.lists(st.integers(0, 10_000), unique=True, max_size=40))
def test_every_link_of_the_ring_once_in_at_most_three_passes(ranks: list[int]) -> None:
    found = passes(ranks)
    assert len(found) <= (2 if len(ranks) % 2 == 0 else 3)
    for pairs in found:
        talking = [rank for pair in pairs for rank in pair]
        assert len(set(talking)) == len(talking)
    links = [pair for pairs in found for pair in pairs]
    assert sorted(links) == sorted((a, b) for a, b in zip(ranks, ranks[1:] + ranks[:1], strict=True) if len(ranks) > 1)


@pytest.mark.parametrize(
    ("suspected_ranks", "last_at", "ranks", "because"),
    [
        ({}, None, None, "nobody is in doubt"),
        ({3: 0.4, 1: 0.3}, None, (1, 3), "ranks 1, 3 are slower than they were for 8 iterations"),
        ({3: 0.4}, 60, None, "were probed after iteration 60"),
        ({3: 0.4}, 50, (3,), "ranks 3"),
        (dict.fromkeys(range(5), 0.4), None, None, "5 of 8 ranks are slower than predicted: that is not a device's fault"),
    ],
)
def test_when_suspects_are_probed(suspected_ranks, last_at, ranks, because) -> None:
    probe, reason = wanted(100, suspected_ranks, 8, last_at, OPTIONS)
    assert (probe.ranks if probe else None) == ranks
    assert because in reason


def span(rank: int, us: int, **fields: int) -> Span:
    return Span(kind="probe", device="d", rank=rank, plan_version=1, attempt=0, iteration=9, start_us=0, wall_us=us, **fields)


def test_slowdowns_links_and_cost_from_the_spans() -> None:
    before = [span(rank, 1_000, compute_us=us) for rank in (0, 1) for us in (900, 1_000, 5_000)]
    after = [
        *(span(0, us, compute_us=us) for us in (1_600, 1_500, 9_000)),
        *(span(1, 1_000, compute_us=1_000) for _ in range(3)),
        *(span(1, size >> 10, peer=0, bytes=size) for size in Probe(ranks=(0, 1)).message_bytes),
        span(2, 700, compute_us=700),
    ]
    found = measured(after, references(before)[0])
    assert found.slowdowns == {0: 1.6, 1: 1.0}
    assert found.links == {(0, 1): 1024.0}
    assert found.cost_us == 3_000 + (16 + 32 + 64) * 1024
