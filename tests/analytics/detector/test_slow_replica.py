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
    excess = np.array(levels)[None, :, None].repeat(3, axis=2)
    recent = tuple(ExcessSample(at, excess) for at in range(30, 38))
    tracks = msgspec.structs.replace(Tracks.none(), ranks=tuple(range(len(levels))), kinds=("B", "F", ALL), recent=recent)
    found = slow_replicas(OF_JOB, tracks, PLAN, DetectorOptions(), at=37)
    assert ([] if found is None else [*found.slow]) == named
