"""ResiHP's Scheduler: TP, then PP, then DP, each on what the level before left unbalanced (section 6).

`levels` switches levels off as the paper's Figure 11 does. Without the TP level a group with a dead member is lost whole (as
ReCycle has it); without the PP level the partition stays; without the DP level the work of dead groups goes evenly to its peers
(ReCycle), and nothing else moves. Where a level leaves something open, the plan that the simulator ends earliest is taken: the
present partition or one of two (pp.py), each with what the DP level makes of it.
TP and PP take k of tp devices for k / tp of the speed, as the paper does, whatever was measured; the speeds of the result are
the measured ones. There is no test whether a plan is worth its cost: the paper has none (scheduler/cost_benefit.py is ours).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from math import inf

import msgspec
import numpy as np

from unskew.analytics.core.layout import Layout, Move
from unskew.analytics.core.plan import PlanError, split_evenly
from unskew.analytics.planners.problem import (
    Floats,
    Ints,
    Level,
    PlannerCluster,
    PlannerJob,
    extra_layers,
    layout_of,
    scheduled,
)
from unskew.analytics.planners.resihp.dp import Migration, migrate, moves_of, reroute_evenly
from unskew.analytics.planners.resihp.evaluation import iteration_us
from unskew.analytics.planners.resihp.pp import PpDecision, partitions
from unskew.analytics.planners.resihp.tp import exclude

ALL_LEVELS: frozenset[Level] = frozenset({"tp", "pp", "dp"})
DELTAS = (1.0, inf)
"""Algorithm 1's threshold, which the paper does not give: what is tried."""
TOO_LONG = 1 + 1e-6
"""Partitions whose bound is above the best plan by this factor are not played."""


class ProgressivePlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The layout, its predicted iteration and what each level decided; `tp`: how many groups are not whole and healthy."""

    layout: Layout
    predicted_us: float
    tp: int = 0
    pp: PpDecision | None = None
    dp: tuple[Migration, ...] = ()


def plan_progressive(
    cluster: PlannerCluster, *, levels: Set[Level] = ALL_LEVELS, deltas: Sequence[float] = DELTAS
) -> ProgressivePlan:
    """The plan of ResiHP for the cluster as it is. Raises `PlanError` when nobody is left for a stage or takes its work."""
    job, (dp, pp, tp) = cluster.job, cluster.speeds.shape
    before = np.array(split_evenly(job.n_layers, pp), dtype=np.int64)
    counts = np.array(split_evenly(job.micro_batches, dp), dtype=np.int64)
    tp_level = 0
    if "tp" in levels:
        ideal = msgspec.structs.replace(cluster, efficiency=())
        groups = exclude(ideal, powers_of_two=True, least=least_degrees(cluster, before))
        members, degrees, estimated = groups.members, groups.degrees, groups.speeds
        tp_level = int((cluster.speeds < 1.0).any(axis=2).sum())
        speeds = estimated * cluster.rates[degrees] / np.maximum(ideal.rates[degrees], 1.0 / tp)
    else:
        whole = cluster.speeds.min(axis=2)
        members = np.where(whole[:, :, None] > 0, np.arange(dp * pp * tp).reshape(dp, pp, tp), -1)
        degrees = np.where(whole > 0, tp, 0).astype(np.int64)
        estimated = speeds = whole * cluster.rates[-1]
    if (gone := ~(speeds > 0).any(axis=0)).any():
        raise PlanError(f"stage {int(np.argmax(gone))} has no group left in any replica: a checkpoint is needed")
    tried = partitions(cluster, estimated, degrees, before.tolist()) if "pp" in levels else [tuple(before.tolist())]
    found: dict[tuple[int, int], ProgressivePlan] = {}
    promised = [_least_us(job, speeds, partition) for partition in tried]
    for number in sorted(range(len(tried)), key=promised.__getitem__):
        if promised[number] > min((plan.predicted_us for plan in found.values()), default=inf) * TOO_LONG:
            break
        layers = np.tile(np.array(tried[number], dtype=np.int64), (dp, 1))
        for turn, delta in enumerate(deltas if "dp" in levels else deltas[:1]):
            dp_level = migrate(cluster, speeds, degrees, layers, counts, delta=delta) if "dp" in levels else ()
            moves = moves_of(dp_level) if "dp" in levels else reroute_evenly(speeds, counts)
            if not _taken(speeds, layers, counts, moves):
                continue
            layout = scheduled(cluster, layout_of(members, layers, counts, moves))
            pp_level = PpDecision(before=tuple(before.tolist()), after=tried[number]) if "pp" in levels else None
            found[number, turn] = ProgressivePlan(
                layout=layout, predicted_us=iteration_us(cluster, layout), tp=tp_level, pp=pp_level, dp=dp_level
            )
    best: ProgressivePlan | None = None
    for _, plan in sorted(found.items()):
        if best is None or plan.predicted_us < best.predicted_us * (1 - 1e-9):
            best = plan
    if best is None:
        raise PlanError("a stage of a replica has no group, and no other takes its work")
    return best


def _least_us(job: PlannerJob, speeds: Floats, partition: Sequence[int]) -> float:
    """No plan of this partition has a shorter iteration, whoever lends what to whom: each stage's work at the speed that its
    groups reach together, behind the first forward that gets there, and before the last backward's way back."""
    work = np.array(partition) + extra_layers(job, len(partition))
    there, *back = (np.cumsum(work * us / speeds.max(axis=0)) - work * us / speeds.max(axis=0) for us in job.kinds_us)
    busy_us = job.micro_batches * work * sum(job.kinds_us) / speeds.sum(axis=0)
    return float((there + busy_us + (0.0 if job.splits else back[0])).max()) + job.iteration_end_us


def _taken(speeds: Floats, layers: Ints, counts: Ints, moves: tuple[Move, ...]) -> bool:
    """Whether other replicas take all work of stages without a group."""
    taken = Counter[tuple[int, int]]()
    for move in moves:
        taken[move.source, move.stage] += len(move.micro_batches)
    lost = np.argwhere((speeds <= 0) & (layers > 0)).tolist()
    return all(taken[replica, stage] >= int(counts[replica]) for replica, stage in lost)


def least_degrees(cluster: PlannerCluster, layers: Ints) -> Ints:
    """k_min of eq. 3 [pp]: the smallest degree whose shard of the stage fits the memory; tp + 1 when none does."""
    job = cluster.job
    if job.capacity_bytes is None:
        return np.ones(cluster.pp, dtype=np.int64)
    in_flight = cluster.pp - np.arange(cluster.pp)
    needed = job.stage_bytes(layers, in_flight, again=True) / job.capacity_bytes
    return np.clip(np.ceil(needed - 1e-9), 1, cluster.tp + 1).astype(np.int64)
