"""unskew: the Scheduler that decides for ranks (analytics/scheduler/), asked by the simulator as the controller asks it."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache

import msgspec
import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.cluster.timing import fault_free_s, rank_cost, rank_speeds, slow_links
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout, Pipeline, to_plan
from unskew.analytics.core.plan import Plan, PlanError, split_evenly
from unskew.analytics.pipeline.memory import LayerMemory, Room
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.policies.base import (
    FAIL_SLOW,
    ClusterView,
    Pauses,
    Policy,
    Reaction,
    from_checkpoint,
    moved_layers,
    regroup,
    survives,
    wait,
    with_spares,
)
from unskew.analytics.policies.layout_of import layout_of
from unskew.analytics.scheduler.propose import propose
from unskew.analytics.scheduler.recovery import recover_with_spares
from unskew.analytics.scheduler.state import SchedulerOptions, SchedulerState

SETTLE = 2
"""So many iterations after a change the Scheduler is asked for a better plan, as in a run (`AdaptationOptions.settle`)."""
MOST_ITERATIONS = 1_000_000
"""What is left of a job whose end is not known."""


class UnskewPolicy(Policy):
    """A death is answered as in a run: the lost work is rerouted to who holds its layers, and two iterations later the
    Scheduler is asked for a better plan; so it is after any other event. When a layer has lost its last holder the job starts
    again from the checkpoint, with as many even replicas as there are ranks for, or waits for ranks
    (`unskew run --when-stuck wait`). A spare node takes the places of a lost one, as a rank that is started again does.
    """

    name = "unskew"
    takes_spares = True
    most_devices = 1024
    sees = FAIL_SLOW
    checkpoint_s = constant("checkpoint_interval_s")
    false_alarm_s = constant("resihp_false_alarm_s")
    false_alarms_per_hour = constant("resihp_false_alarms_per_job")
    slow_recall = constant("resihp_slow_recall")

    def __init__(self, options: SchedulerOptions | None = None) -> None:
        self._options = options or SchedulerOptions()

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        restored, nodes, slots = with_spares(cluster)
        alive = frozenset(np.flatnonzero(restored.speeds > 0.0).tolist())
        try:
            if not cluster.layout.pipelines or not survives(cluster):
                reaction = _begun_again(cluster, restored, alive)
            else:
                reaction = self._changed(restored, alive, slots)
        except PlanError as error:
            return wait(str(error))
        return msgspec.structs.replace(reaction, spares=nodes, replaced=slots)

    def _changed(self, cluster: ClusterView, alive: frozenset[int], slots: Collection[int]) -> Reaction:
        """Another plan, or the one in force; `slots` have new hardware, which has yet to receive its layers."""
        job, held = cluster.job, cluster.holding()
        plan = to_plan(cluster.layout, job.n_layers)
        state = state_of(cluster, alive)

        def reaction(chosen: Plan, reason: str, *, reviewed: bool = False) -> Reaction:
            layout = cluster.layout if chosen.digest == plan.digest else layout_of(chosen)
            stays = layout == cluster.layout and layout.devices.isdisjoint(slots)
            pauses: Pauses = () if stays else regroup(job, moved_layers(held, layout))
            later = _review(cluster, pauses, layout) if reviewed else ()
            return Reaction(layout=layout, pauses=pauses, later=later, reason=reason)

        if gone := set(plan.ranks) - alive:
            spares = alive - set(plan.ranks)
            try:
                recovered, how = recover_with_spares(plan, gone, 1, spares, lambda one: _expected_us(one, state))
            except PlanError:  # of what survives in parts no group can be made
                return _begun_again(cluster, cluster, alive)
            return reaction(recovered, how, reviewed=True)
        try:
            proposal, reason = propose(_now(cluster, _iteration_s(cluster)), plan, state, self._options)
        except PlanError as error:  # the plan in force works
            return reaction(plan, f"no other plan could be made: {error}")
        return reaction(plan if proposal is None else proposal.plan, reason)


def state_of(cluster: ClusterView, alive: frozenset[int]) -> SchedulerState:
    """What the Scheduler is told of a simulated job: each device is a rank, at the place that it had at the start."""
    job, iteration_s = cluster.job, _iteration_s(cluster)
    layer_bytes = (max(1, round(job.parameters / job.n_layers * constant("bytes_per_parameter"))),) * job.n_layers
    return SchedulerState(
        origin=_origin(job),
        alive=alive,
        speeds={rank: of for rank, of in rank_speeds(cluster.speeds).items() if rank in alive},
        cost=msgspec.structs.replace(rank_cost(job), slow_links=slow_links(job, cluster.links)),
        batches=((job.work,) * job.micro_batches,),
        iterations=_now(cluster, iteration_s) + _left(cluster, iteration_s),
        layer_bytes=layer_bytes,
        bytes_per_us=constant("layer_copy_bytes_per_s") / 1e6 * job.tp,
        regroup_us=1e6 * (constant("regroup_s") + constant("planning_s")),
        slow_since={rank: round(since_s / iteration_s) for rank, since_s in cluster.slow_since_s.items()},
        units=job.heads,
        room=Room(memory=LayerMemory.of_layers(layer_bytes), tokens=0, rank_bytes=job.room_bytes),
        ranks_per_node=job.gpus_per_node if job.tp <= job.gpus_per_node else 0,
        prices_sums=False,
    )


def even_layout(job: Job, alive: Collection[int]) -> Layout:
    """As many even replicas as there are ranks for; the members of a group share a node. Raises `PlanError` without one."""
    nodes: dict[int, list[int]] = {}
    for rank in sorted(alive):
        nodes.setdefault(job.node(rank) if job.tp <= job.gpus_per_node else 0, []).append(rank)
    groups = [
        tuple(ranks[first : first + job.tp]) for ranks in nodes.values() for first in range(0, len(ranks) - job.tp + 1, job.tp)
    ]
    replicas = min(len(groups) // job.pp, job.dp)
    if not replicas:
        raise PlanError(f"{len(groups)} groups of {job.tp} are left, and a pipeline takes {job.pp}")
    layers = tuple(split_evenly(job.n_layers, job.pp))
    shares = split_evenly(job.micro_batches, replicas)
    return Layout(
        tuple(
            Pipeline(replica, tuple(groups[replica * job.pp : (replica + 1) * job.pp]), layers, shares[replica])
            for replica in range(replicas)
        ),
        schedule=job.schedule,
    )


def _begun_again(cluster: ClusterView, restored: ClusterView, alive: Collection[int]) -> Reaction:
    layout = even_layout(cluster.job, alive)
    reaction = from_checkpoint(layout)
    return msgspec.structs.replace(reaction, later=_review(restored, reaction.pauses, layout))


def _review(cluster: ClusterView, pauses: Pauses, layout: Layout) -> tuple[ClusterEvent, ...]:
    """The Scheduler is asked once the change has settled."""
    iteration_s = cluster.seconds(layout)
    if math.isinf(iteration_s):
        iteration_s = fault_free_s(cluster.job)
    at_s = cluster.now_s + sum(seconds for _, seconds in pauses) + SETTLE * iteration_s
    return (ClusterEvent(kind="review", at_s=at_s, why="a better plan"),)


@lru_cache(maxsize=64)
def _origin(job: Job) -> Plan:
    return to_plan(healthy(job), job.n_layers)


def _expected_us(plan: Plan, state: SchedulerState) -> float:
    return predict_iteration(plan, state.batches[0], state.cost, state.speeds).iteration_us


def _iteration_s(cluster: ClusterView) -> float:
    seconds = cluster.seconds(cluster.layout)
    return fault_free_s(cluster.job) if math.isinf(seconds) else seconds


def _now(cluster: ClusterView, iteration_s: float) -> int:
    return round(cluster.now_s / iteration_s)


def _left(cluster: ClusterView, iteration_s: float) -> int:
    """Iterations until the end."""
    return round(min((cluster.ends_s - cluster.now_s) / iteration_s, MOST_ITERATIONS))
