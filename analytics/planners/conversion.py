"""An assignment as the plan that ranks execute, and a plan's layout as the planners see it."""

from __future__ import annotations

import numpy as np

from unskew.analytics.core.plan import Hop, Plan, PlanError, Role, Route, validate
from unskew.analytics.planners.problem import Assignment, Ints, PlannerCluster


def members(cluster: PlannerCluster, assignment: Assignment, replica: int, stage: int) -> tuple[int, ...]:
    """Device numbers of a group that work, ascending."""
    first = (replica * cluster.pp + stage) * cluster.tp
    own = [first + int(shard) for shard in np.flatnonzero(assignment.active[replica, stage])]
    lent = [entry.device for entry in assignment.borrowed if (entry.replica, entry.stage) == (replica, stage)]
    return tuple(sorted(own + lent))


def to_plan(cluster: PlannerCluster, assignment: Assignment, *, plan_version: int, schedule: str = "1f1b") -> Plan:
    """Ranks are device numbers; micro-batches are dealt to their homes in turn, in proportion. Raises `PlanError`."""
    n_layers = cluster.job.n_layers
    first_layer: Ints = np.cumsum(assignment.layers, axis=1) - assignment.layers
    roles: list[Role] = []
    hops: dict[tuple[int, int], Hop] = {}
    for replica, stage in zip(*np.nonzero((assignment.layers > 0) & (assignment.speeds > 0)), strict=True):
        first, held = int(first_layer[replica, stage]), int(assignment.layers[replica, stage])
        ranks = members(cluster, assignment, int(replica), int(stage))
        hops[int(replica), int(stage)] = Hop(first_layer=first, n_layers=held, ranks=ranks)
        roles += [
            Role(rank=rank, replica=int(replica), stage=int(stage), first_layer=first, n_layers=held, shard=shard)
            for shard, rank in enumerate(ranks)
        ]
    moved = {(move.source, j, move.stage): move.target for move in assignment.moves for j in move.micro_batches}
    routes = []
    for number, (replica, j) in enumerate(_dealt(assignment.micro_batches.tolist())):
        used = np.flatnonzero(assignment.layers[replica]).tolist()
        places = [(moved.get((replica, j, stage), replica), stage) for stage in used]
        if missing := [stage for place, stage in places if (place, stage) not in hops]:
            raise PlanError(f"stage {missing[0]} of replica {replica} has no group, and no other takes its micro-batch {j}")
        legs = tuple(hops[place] for place in places)
        routes.append(Route(micro_batch=number, replica=replica, hops=legs))
    plan = Plan(plan_version=plan_version, n_layers=n_layers, schedule=schedule, roles=tuple(roles), routes=tuple(routes))
    validate(plan)
    return plan


def _dealt(counts: list[int]) -> list[tuple[int, int]]:
    """(home, number within home) of every micro-batch: in turn, in proportion to the homes' counts."""
    keys = [((j + 1) / count, home, j) for home, count in enumerate(counts) for j in range(count)]
    return [(home, j) for _, home, j in sorted(keys)]
