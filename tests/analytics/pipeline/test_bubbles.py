"""Classes of idle time and the most activations kept, on a case that can be worked out by hand and in general."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.plan import PASSES
from unskew.analytics.pipeline.bubbles import bubbles
from unskew.analytics.pipeline.memory import peak_activations
from unskew.analytics.pipeline.schedule import per_hop, pipeline_of


def test_the_bubbles_of_two_stages_by_hand():
    """1F1B, 2 ranks, 2 micro-batches, F = 1, B = 2: rank 0 F0 F1 .. B0 .. B1, rank 1 . F0 B0 F1 B1 ..; 9 in all."""
    chunks = pipeline_of("1f1b", ranks=2, micro_batches=2)
    start, end = chunks.run(per_hop(chunks, np.array([[1.0, 1.0], [2.0, 2.0]])))
    found = bubbles(chunks, start, end)
    assert end.max() == 9
    assert found.ranks == (0, 1)
    assert found.idle_us.tolist() == [3, 3]
    assert found.boundary_us.tolist() == [0, 3]
    assert found.residual_us.tolist() == [3, 0]


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(sorted(PASSES)), ranks=st.integers(1, 4), groups=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_classes_add_up(name, ranks, groups, seed):
    chunks = pipeline_of(name, ranks=ranks, micro_batches=groups * ranks)
    random = np.random.default_rng(seed)
    durations = random.uniform(1, 3, (len(chunks), 5))
    start, end = chunks.run(durations, 0.2)
    found = bubbles(chunks, start, end)
    busy = np.stack([durations[positions].sum(axis=0) for _, positions in chunks.rank_positions()])
    assert found.idle_us + busy == pytest.approx(np.broadcast_to(end.max(axis=0), busy.shape))
    assert found.boundary_us + found.residual_us == pytest.approx(found.idle_us)
    for part in (found.boundary_us, found.residual_us):
        assert (part >= -1e-9).all()


@pytest.mark.parametrize(("name", "peaks"), [("1f1b", [6, 6, 1]), ("gpipe", [16, 24, 8]), ("zb-h1", [6, 9, 3])])
def test_the_most_activations_of_three_stages_by_hand(name, peaks):
    """8 micro-batches, stages that keep 2, 3 and 1 of each: 1F1B has 3, 2, 1 in flight, GPipe all, ZB-H1 3 until their W."""
    chunks = pipeline_of(name, ranks=3, micro_batches=8)
    assert peak_activations(chunks, np.array([2.0, 3.0, 1.0])) == dict(enumerate(peaks))
