"""Classes of idle time and memory over time, on a case that can be worked out by hand and in general."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.plan import PASSES, Plan, splits_backward
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.bubbles import bubbles
from unskew.analytics.pipeline.evaluator import per_hop, pipeline_of
from unskew.analytics.pipeline.memory import BYTES_PER_PARAMETER, memory_over_time, peak_activations
from unskew.analytics.pipeline.model_profiles import TOKENS, model_profile
from unskew.analytics.pipeline.prediction import unit_durations_us
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.planners.adaptis.layouts import usual


def test_the_bubbles_of_two_stages_by_hand():
    """1F1B, 2 ranks, 2 micro-batches, F = 1, B = 2: rank 0 F0 F1 .. B0 .. B1, rank 1 . F0 B0 F1 B1 ..; 9 in all.

    The first backward begins at 2 (rank 1), the last forward ends at 5 (rank 1).
    """
    chunks = pipeline_of("1f1b", ranks=2, micro_batches=2)
    start, end = chunks.run(per_hop(chunks, np.array([[1.0, 1.0], [2.0, 2.0]])))
    found = bubbles(chunks, start, end)
    assert end.max() == 9
    assert found.ranks == (0, 1)
    assert found.idle_us.tolist() == [3, 3]
    assert found.warm_up_us.tolist() == [0, 1]
    assert found.steady_us.tolist() == [2, 0]
    assert found.cool_down_us.tolist() == [1, 2]
    assert found.boundary_us.tolist() == [0, 3]
    assert found.residual_us.tolist() == [3, 0]


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(sorted(PASSES)), ranks=st.integers(1, 4), groups=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_classes_add_up_and_memory_returns_to_what_is_always_held(name, ranks, groups, seed):
    chunks = pipeline_of(name, ranks=ranks, micro_batches=groups * ranks)
    random = np.random.default_rng(seed)
    durations = random.uniform(1, 3, (len(chunks), 5))
    start, end = chunks.run(durations, 0.2)
    found = bubbles(chunks, start, end)
    busy = np.stack([durations[positions].sum(axis=0) for _, positions in chunks.rank_positions()])
    assert found.idle_us + busy == pytest.approx(np.broadcast_to(end.max(axis=0), busy.shape))
    assert found.warm_up_us + found.cool_down_us + found.steady_us == pytest.approx(found.idle_us)
    assert found.boundary_us + found.residual_us == pytest.approx(found.idle_us)
    for part in (found.warm_up_us, found.cool_down_us, found.steady_us, found.boundary_us, found.residual_us):
        assert (part >= -1e-9).all()
    activations = random.integers(1, 9, ranks * PASSES[name]).astype(float)
    usage = memory_over_time(chunks, start[:, 0], end[:, 0], activations, dict.fromkeys(range(ranks), 10))
    peaks = peak_activations(chunks, activations)
    for rank, steps in usage.items():
        assert (np.diff(steps.at_us) >= 0).all()
        assert steps.bytes[0] == steps.bytes[-1] == 10 * BYTES_PER_PARAMETER
        assert steps.peak_bytes == pytest.approx(10 * BYTES_PER_PARAMETER + peaks[rank])
        kinds = (chunks.rank == rank) & (chunks.kind == (2 if splits_backward(name) else 1))
        assert steps.at_us[-1] == pytest.approx(end[kinds, 0].max())


def test_unequal_units_cost_what_their_lengths_and_devices_say():
    """Jamba's units on 4 ranks, rank 2 at half speed: a chunk is the sum of its units, quadratic in attention alone."""
    profile = model_profile("jamba-52b")
    units = profile.units
    plan = plan_from_partition(
        plan_version=0, n_layers=34, schedule="zb-h1", members=[range(4)], layers=[usual(34, 4)], micro_batches=[2]
    )
    schedule = build_schedule(plan)
    batches = [[Work(TOKENS, TOKENS**2), Work(TOKENS, TOKENS**2 // 4)]]
    durations = unit_durations_us(schedule, profile, batches, {2: dict.fromkeys("FBW", 0.5)})[:, 0]
    for action, took in zip(schedule.order, durations, strict=True):
        own = units[action.first_layer : action.first_layer + action.n_layers]
        f, b, w = (
            sum(parts) for parts in zip(*(u.scaled(1.0, 1.0 if action.micro_batch == 0 else 0.25) for u in own), strict=True)
        )
        assert took == pytest.approx({"F": f, "B": b, "W": w}[action.kind] * (2 if action.rank == 2 else 1))
    whole = build_schedule(Plan(plan_version=0, n_layers=34, schedule="1f1b", roles=plan.roles, routes=plan.routes))
    assert unit_durations_us(whole, profile, batches).sum() == pytest.approx(
        unit_durations_us(schedule, profile, batches).sum()
    )
    with pytest.raises(ValueError, match="which has 34 units"):
        unit_durations_us(build_schedule(uniform_plan(tp=1, pp=2, dp=1, n_layers=4, micro_batches=2)), profile, batches)
