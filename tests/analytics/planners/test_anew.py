"""All that is left laid out anew: any group on any stage, rows of unequal depth, a node's fastest devices together."""

import msgspec
import numpy as np
import pytest

from unskew.analytics.core.layout import to_plan
from unskew.analytics.core.plan import PlanError, validate
from unskew.analytics.planners.joint import anew
from unskew.analytics.planners.joint.anew import plan_anew
from unskew.analytics.planners.joint.joint import plan_joint
from unskew.analytics.planners.problem import PlannerJob, healthy_cluster
from unskew.analytics.planners.resihp.evaluation import iteration_us


def test_rows_of_unequal_depth_keep_every_group_at_work():
    """Ten groups for eight replicas: two rows of two stages and six of one, not five rows of two."""
    job = PlannerJob(n_layers=24, micro_batches=48)
    cluster = healthy_cluster(job, tp=1, pp=2, dp=8)
    speeds = cluster.speeds.copy()
    speeds[5:] = 0.0
    layout = plan_anew(cluster.with_speeds(speeds)).layout
    assert sorted(len([n for n in one.layers if n]) for one in layout.pipelines) == [1] * 6 + [2] * 2
    deep = plan_anew(healthy_cluster(job, tp=1, pp=2, dp=5))
    assert iteration_us(cluster, layout) < 0.92 * deep.predicted_us


@pytest.mark.parametrize("seed", range(40, 52))
def test_the_numbers_of_replicas_that_are_planned_hold_the_best(seed, monkeypatch):
    random = np.random.default_rng(seed)
    pp, dp = int(random.integers(1, 5)), int(random.integers(2, 9))
    n_layers = int(random.integers(2 * pp, 33))
    room = None if random.random() < 0.5 else n_layers / pp * float(random.uniform(0.6, 1.5))
    job = PlannerJob(n_layers=n_layers, micro_batches=dp * int(random.integers(1, 7)), layer_bytes=1.0, capacity_bytes=room)
    cluster = healthy_cluster(job, tp=1, pp=pp, dp=dp)
    speeds = cluster.speeds.copy()
    speeds[random.random(speeds.shape) < 0.4] = 0.0
    cluster = cluster.with_speeds(speeds)
    try:
        planned = plan_anew(cluster)
    except PlanError:
        assert room is not None
        assert int(speeds.sum()) * int(room) < n_layers
        return
    monkeypatch.setattr(anew, "SHAPES", dp)
    assert planned.predicted_us <= 1.02 * plan_anew(cluster).predicted_us
    validate(to_plan(planned.layout, n_layers))


def test_a_single_replica_is_not_planned_where_it_cannot_repay_the_second_copy(monkeypatch):
    """It promises 1.5 % more than two replicas take, and had to be a tenth faster."""
    cluster = healthy_cluster(PlannerJob(n_layers=60, micro_batches=32), tp=1, pp=8, dp=2)
    speeds = cluster.speeds.copy()
    speeds[0, 1] = 0.6
    depths = []
    planned = anew._planned
    monkeypatch.setattr(anew, "_planned", lambda asked, rows: depths.append([*map(len, rows)]) or planned(asked, rows))
    assert len(plan_anew(cluster.with_speeds(speeds)).layout.pipelines) == 2
    assert depths == [[8, 8]]


def test_a_node_s_fastest_devices_work_together_where_that_gives_more():
    """One slow device in each of a node's two groups: four fast ones make a whole group; on nodes of their own they cannot."""
    job = PlannerJob(n_layers=24, micro_batches=16)
    cluster = healthy_cluster(job, tp=4, pp=2, dp=2, devices_per_node=8, efficiency=(0.28, 0.53, 0.74, 1.0))
    speeds = cluster.speeds.copy()
    speeds[0, 0, :2], speeds[0, 1, 2:] = 0.3, (0.0, 0.4)
    cluster = cluster.with_speeds(speeds)
    together = plan_anew(cluster)
    validate(to_plan(together.layout, 24))
    assert any(set(group) == {2, 3, 4, 5} for group in _groups(together.layout))
    apart = plan_anew(msgspec.structs.replace(cluster, nodes=None))
    assert together.predicted_us < 0.97 * apart.predicted_us
    assert together.predicted_us < 0.97 * plan_joint(cluster).predicted_us
    assert iteration_us(cluster, together.layout) == pytest.approx(together.predicted_us)


def test_groups_stay_as_they_are_where_regrouping_gives_nothing():
    job = PlannerJob(n_layers=24, micro_batches=16)
    cluster = healthy_cluster(job, tp=4, pp=2, dp=2, devices_per_node=8)
    speeds = cluster.speeds.copy()
    speeds[1, 0, 2] = 0.9
    for group in _groups(plan_anew(cluster.with_speeds(speeds)).layout):
        assert len({device // 4 for device in group}) == 1


def test_whom_a_group_is_better_off_without_makes_a_group_of_its_own():
    """One node is left, with a slow device: the model on four, two and one of its devices, not on four and two."""
    job = PlannerJob(n_layers=48, micro_batches=32, layer_bytes=1.0, capacity_bytes=8.0)
    cluster = healthy_cluster(job, tp=4, pp=2, dp=2, devices_per_node=8, efficiency=(0.28, 0.53, 0.74, 1.0))
    speeds = np.zeros_like(cluster.speeds)
    speeds[0].ravel()[:] = 1.0
    speeds[0, 1, 1:] = (1.0, 0.5, 0.0)
    plan = plan_anew(cluster.with_speeds(speeds))
    validate(to_plan(plan.layout, 48))
    assert sorted(map(len, _groups(plan.layout))) == [1, 2, 4]


def _groups(layout):
    return [group for pipeline in layout.pipelines for group in pipeline.groups if group]
