"""Malleus' worked examples, and its rules for groups and for planning again."""

import numpy as np
import pytest

from unskew.analytics.core.sharing import share_out
from unskew.analytics.planners.joint.evaluation import iteration_us
from unskew.analytics.planners.malleus import cut_node, deal, layers_of, micro_batches_of, must_replan, plan_malleus, rates
from unskew.analytics.planners.problem import PlannerJob, healthy_cluster, start

ALPHA_70B = (7.22, 3.66, 1.90, 1.0)
"""Slow-down of a layer on tp/8, tp/4, tp/2 and tp devices."""


def test_the_70b_example():
    one, two, four, whole = ALPHA_70B
    first, o_first = layers_of([one, two, two, four, four, four, whole, whole], 80)
    second, o_second = layers_of([one, one, two, whole, whole, whole], 80)
    assert first == [2, 5, 5, 10, 10, 10, 19, 19]
    paper = [3, 3, 6, 23, 22, 23]  # one layer less than would fit: which group goes without is open
    assert sum(abs(ours - theirs) for ours, theirs in zip(second, paper, strict=True)) <= 2
    assert (o_first, o_second) == (19.0, 23.0)
    assert micro_batches_of([o_first, o_second], [8, 6], 64) == ([35, 29], 667.0)


def thirty_two(**memory):
    cluster = healthy_cluster(
        PlannerJob(n_layers=60, micro_batches=64, **memory), tp=2, pp=4, dp=4, devices_per_node=2, efficiency=(0.1, 1.0)
    )  # half a pair does less than a pair with its straggler
    speeds = cluster.speeds.copy()
    speeds[0, 0, 0], speeds[1, 2, 1], speeds[2, 3, 0] = 1 / 2.34, 1 / 3.8, 1 / 2.0
    return cluster, cluster.with_speeds(speeds)


def test_the_32_gpu_example():
    """60 layers, 4 pipelines of 4 pairs, rates 2.34, 3.8 and 2.0 in three pairs; no group holds more than 22 layers."""
    bottlenecks = [layers_of(part, 60)[1] for part in ([2.34, 2.0, 1, 1], [3.8, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1])]
    assert bottlenecks[1:] == [19, 15, 15]
    assert micro_batches_of([22, 19, 15, 15], [4, 4, 4, 4], 64)[1] == 285
    healthy, slow = thirty_two(layer_bytes=1.0, capacity_bytes=11.0)
    plan = plan_malleus(slow)
    assert plan.objective == pytest.approx(285)
    assert plan.layout.micro_batches == 64
    assert plan.layout.layers.sum(axis=1).tolist() == [60] * 4
    assert plan.layout.layers.max() <= 22
    assert iteration_us(healthy, start(healthy)) < iteration_us(slow, plan.layout) < iteration_us(slow, start(slow))
    assert plan_malleus(thirty_two()[1]).objective == pytest.approx(280)  # all three in one pipeline, if memory allowed


def test_a_node_is_cut_for_the_most_throughput():
    alpha = [0.0, 7.22, 3.66, 3.66, 1.90, 1.90, 1.90, 1.90, 1.0]
    rate = [1.0] * 8
    assert [group.rate for group in cut_node(range(8), rate, alpha)] == [1.0]
    rate[5] = 12.53
    groups = cut_node(range(8), rate, alpha)
    assert [len(group.devices) for group in groups] == [4, 2, 1]
    assert all(5 not in group.devices for group in groups)
    rate[5] = 1.05
    assert [len(group.devices) for group in cut_node(range(8), rate, alpha)] == [8]


def test_the_second_program_is_the_greedy_answer():
    shares = share_out(64, [(0.0, 19.0), (0.0, 23.0), (0.0, 15.0)])
    counts, objective = micro_batches_of([19.0, 23.0, 15.0], [1, 1, 1], 64)
    assert objective == max(o * m for o, m in zip([19.0, 23.0, 15.0], shares, strict=True))
    assert sum(counts) == 64


def test_templates_differ_and_keep_stragglers_in_front():
    templates = deal([3.0, 2.0], 6, 2)
    assert all(part == sorted(part, reverse=True) for template in templates for part in template)
    assert {tuple(map(len, template)) for template in templates} == {(4, 4)}
    assert len(templates) == 2  # both in one pipeline, or one in each; what is only renumbered is left out


def test_small_changes_do_not_replan():
    before = rates(np.array([1.0, 0.5, 0.4]))
    assert not must_replan(before, rates(np.array([0.9, 0.45, 0.4])))
    assert must_replan(before, rates(np.array([1.0, 0.4, 0.4])))
    assert must_replan(before, rates(np.array([0.0, 0.5, 0.4])))


def test_whole_groups_stay_where_their_layers_are():
    cluster = healthy_cluster(PlannerJob(n_layers=32, micro_batches=16), tp=2, pp=4, dp=2, devices_per_node=2)
    plan = plan_malleus(cluster)
    assert plan.layout == start(cluster)
    speeds = cluster.speeds.copy()
    speeds[0, 2, 0] = 0.4
    moved = plan_malleus(cluster.with_speeds(speeds))
    first, *others = moved.layout.pipelines[0].groups
    assert first == (5,)  # what is left of the slow one, in front
    assert set(others) == {(0, 1), (2, 3), (6, 7)}
    assert others[-1] == (6, 7)
