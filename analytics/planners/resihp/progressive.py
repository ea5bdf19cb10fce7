"""ResiHP's Scheduler: TP, then PP, then DP, each on what the level before left unbalanced (section 6).

Every level's decisions are returned, so that an ablation can be replayed; `levels` switches levels off as the paper's Figure 11
does. Without the TP level a group with a dead member is lost whole (as ReCycle has it); without the PP level the partition
stays; without the DP level the work of dead groups goes evenly to its peers (ReCycle), and nothing else moves.
TP and PP take k of tp devices for k / tp of the speed, as the paper does, whatever was measured; the speeds of the result are
the measured ones. There is no test whether a plan is worth its cost: the paper has none (scheduler/cost_benefit.py is ours).
"""

from __future__ import annotations

from collections.abc import Set

import msgspec
import numpy as np

from unskew.analytics.core.plan import PlanError
from unskew.analytics.planners.problem import Assignment, Ints, Level, PlannerCluster, start
from unskew.analytics.planners.resihp.dp import Migration, migrate, moves_of, reroute_evenly
from unskew.analytics.planners.resihp.pp import PpDecision, repartition
from unskew.analytics.planners.resihp.tp import TpDecision, exclude

ALL_LEVELS: frozenset[Level] = frozenset({"tp", "pp", "dp"})


class ProgressivePlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The assignment and what each level decided on the way to it."""

    assignment: Assignment
    tp: tuple[TpDecision, ...] = ()
    pp: PpDecision | None = None
    dp: tuple[Migration, ...] = ()


def plan_progressive(cluster: PlannerCluster, *, levels: Set[Level] = ALL_LEVELS, delta: int = 1) -> ProgressivePlan:
    """The plan of ResiHP for the cluster as it is. Raises `PlanError` when a stage has no group left in any replica."""
    begin = start(cluster)
    before = begin.layers[0]
    active, borrowed, speeds, degrees = begin.active, begin.borrowed, begin.speeds, begin.degrees
    tp: tuple[TpDecision, ...] = ()
    believed = speeds
    if "tp" in levels:
        ideal = msgspec.structs.replace(cluster, efficiency=())
        groups = exclude(ideal, powers_of_two=True, least=least_degrees(cluster, before))
        active, borrowed, degrees, tp = groups.active, groups.borrowed, groups.degrees, groups.decisions
        believed = groups.speeds
        speeds = believed * cluster.rates[degrees] / np.maximum(ideal.rates[degrees], 1.0 / cluster.tp)
    if (gone := ~(speeds > 0).any(axis=0)).any():
        raise PlanError(f"stage {int(np.argmax(gone))} has no group left in any replica: a checkpoint is needed")
    pp = repartition(cluster, believed, degrees, before.tolist()) if "pp" in levels else None
    layers = np.tile(np.array(pp.after if pp else before, dtype=np.int64), (cluster.dp, 1))
    dp = migrate(cluster, speeds, degrees, layers, begin.micro_batches, delta=delta) if "dp" in levels else ()
    return ProgressivePlan(
        assignment=Assignment(
            active=active,
            borrowed=borrowed,
            speeds=speeds,
            degrees=degrees,
            layers=layers,
            micro_batches=begin.micro_batches,
            moves=moves_of(dp) if "dp" in levels else reroute_evenly(speeds, begin.micro_batches),
        ),
        tp=tp,
        pp=pp,
        dp=dp,
    )


def least_degrees(cluster: PlannerCluster, layers: Ints) -> Ints:
    """k_min of eq. 3 [pp]: the smallest degree whose shard of the stage fits the memory; tp + 1 when none does."""
    job = cluster.job
    if job.capacity_bytes is None:
        return np.ones(cluster.pp, dtype=np.int64)
    in_flight = cluster.pp - np.arange(cluster.pp)
    needed = layers * (job.layer_bytes + in_flight * job.activation_bytes) / job.capacity_bytes
    return np.clip(np.ceil(needed - 1e-9), 1, cluster.tp + 1).astype(np.int64)
