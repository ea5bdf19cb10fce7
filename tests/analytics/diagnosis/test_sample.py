"""A long run is looked at in stretches, and the diagnosis says so: what lasts is found, and nothing is claimed of the rest."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from support.dashboard.store import RunWriter

from unskew.analytics.diagnosis import sample as sampling
from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.diagnosis.sample import MOST_EVENTS, sample
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run

ITERATIONS = 120


def test_stretches_are_apart_reach_from_end_to_end_and_hold_no_more_than_may_be_read() -> None:
    chance = random.Random(11)
    for _ in range(300):
        first, count, each = chance.randrange(1000), chance.randrange(1, 20_000), chance.choice((1, 40, 900, 40_000, 10**6))
        found = sample(first, first + count - 1, count * each)
        if count * each <= MOST_EVENTS:
            assert found is None
            continue
        assert found is not None
        assert found.looked_at * each <= max(MOST_EVENTS, each)
        assert found.stretches[0][0] == first
        assert all(begin <= end for begin, end in found.stretches)
        assert all(one[1] < after[0] for one, after in pairwise(found.stretches))
        assert len(found.stretches) == 1 or found.stretches[-1][1] == first + count - 1


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "factor", "at"), [(1, 1.7, 50), (6, 2.2, 70)])
def test_a_lasting_slowdown_is_found_in_a_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, factor: float, at: int
) -> None:
    writer = RunWriter(Store(tmp_path / "store"), "long", iterations=ITERATIONS)
    writer.train(at)
    writer.speeds = {rank: {"F": 1 / factor, "B": 1 / factor}}
    writer.train(ITERATIONS - at)
    writer.close()
    with open_store(tmp_path / "store") as reader:
        whole = diagnose(load_run(reader, "long"))
        (events,) = reader.sql("select sum(n_events)::bigint from writers where run = 'long'").row(0)
        monkeypatch.setattr(sampling, "MOST_EVENTS", events * 2 // 5)
        log = load_run(reader, "long")
    part = diagnose(log)
    assert log.sample is not None
    assert (whole.looked_at, log.sample.stretches[0][0], log.sample.stretches[-1][1]) == ("", 0, ITERATIONS - 1)
    assert {one.committed.iteration for one in log.released} == {
        i for first, last in log.sample.stretches for i in range(first, last + 1)
    }
    for found in (whole, part):
        assert {party.rank for one in found.verdicts if one.cause == "slow_device" for party in one.culprits} == {rank}
    assert log.sample.what in part.looked_at
    assert log.sample.unseen in part.abstained
    assert log.sample.what in part.why
    assert part.time_lost_s["slow_device"] == pytest.approx(whole.time_lost_s["slow_device"], rel=0.35)
