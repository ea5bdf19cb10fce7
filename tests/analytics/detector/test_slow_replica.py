"""Whose slowness the whole job's is: a replica's, by what its ranks and the others show."""

from __future__ import annotations

from math import nan

import msgspec
import numpy as np
import pytest

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import ALL
from unskew.analytics.detector.stages import slow_replicas
from unskew.analytics.detector.tracks import ExcessSample, Tracks
from unskew.collector.events import Verdict

PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
OF_JOB = Verdict(
    verdict=1, cause="unknown", culprits=(), since_iteration=30, at_iteration=37, confidence=0.9, sentence="",
    evidence={"n": 8}, config="",
)  # fmt: skip


def tracks_of(levels: tuple[float, ...]) -> Tracks:
    excess = np.array(levels)[None, :, None].repeat(3, axis=2)
    recent = tuple(ExcessSample(at, excess) for at in range(30, 38))
    return msgspec.structs.replace(Tracks.none(), ranks=tuple(range(len(levels))), kinds=("B", "F", ALL), recent=recent)


@pytest.mark.parametrize(
    ("levels", "named"),
    [
        ((0.4, 0.4, 0.0, 0.0), [0]),
        ((0.0, 0.0, 0.4, 0.4), [1]),
        ((0.4, 0.4, nan, nan), []),
        ((0.4, 0.4, 0.0, nan), []),
        ((0.4, nan, 0.0, 0.0), []),
        ((0.4, 0.4, 0.0), []),
    ],
)
def test_a_replica_is_named_where_no_other_may_be_slow(levels: tuple[float, ...], named: list[int]) -> None:
    """Of ranks that nobody has judged it was said that they are not slow."""
    found = slow_replicas(OF_JOB, tracks_of(levels), PLAN, DetectorOptions())
    assert ([] if found is None else [*found.slowest]) == named


@pytest.mark.parametrize(("lost", "named"), [(1, [1]), (5, [])])
def test_a_rank_that_lost_some_of_its_spans_was_seen_as_often_as_is_needed(lost: int, named: list[int]) -> None:
    """One iteration of eight without its times made nobody of the slow replica."""
    tracks = tracks_of((0.0, 0.0, 0.4, 0.4))
    recent = list(tracks.recent)
    for row in range(lost):
        excess = recent[row].excess.copy()
        excess[0, 0] = nan
        recent[row] = ExcessSample(recent[row].iteration, excess)
    found = slow_replicas(OF_JOB, msgspec.structs.replace(tracks, recent=tuple(recent)), PLAN, DetectorOptions())
    assert ([] if found is None else [*found.slowest]) == named


@pytest.mark.parametrize(
    ("levels", "victims"), [((0.33, 0.33, 0.4, 0.4), []), ((0.35, 0.0, 0.4, 0.4), []), ((0.05, 0.0, 0.4, 0.4), [0])]
)
def test_who_is_slow_too_is_no_victim(levels: tuple[float, ...], victims: list[int]) -> None:
    """A replica at 1.39 beside one at 1.49 times was "a victim, not at fault", and so was one with a rank at 1.42."""
    found = slow_replicas(OF_JOB, tracks_of(levels), PLAN, DetectorOptions())
    assert found is not None
    assert [one.replica for one in found.named_in(OF_JOB).victims] == victims


def test_several_slow_replicas_beside_calm_ones_are_named_together() -> None:
    """Neither is known not to be slow by what the other shows: both are, and the two that are known not to be wait for them."""
    plan = uniform_plan(tp=1, pp=2, dp=4, n_layers=4, micro_batches=8)
    found = slow_replicas(OF_JOB, tracks_of((0.4, 0.5, 0.0, 0.01, 0.4, 0.4, 0.0, 0.0)), plan, DetectorOptions())
    assert found is not None
    named = found.named_in(OF_JOB)
    assert ([one.replica for one in named.culprits], [one.replica for one in named.victims]) == ([0, 2], [1, 3])
    assert named.sentence.startswith(
        "replica 0 (ranks 0, 1) and replica 2 (ranks 4, 5) or their data, and the log does not show which: in iterations 30 to "
        "37 their ranks took 1.57 times as long and 1.49 times as long as their lengths let expect, the other replicas' less; "
    )
    assert named.evidence["ranks"] == [0, 1, 4, 5]
