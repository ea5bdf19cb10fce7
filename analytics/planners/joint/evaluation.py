"""What an assignment costs: replicas on their own by the pipeline formula's DAG, replicas that share work by simulation."""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.planners.costing import replica_us
from unskew.analytics.planners.joint.capability import members_needed
from unskew.analytics.planners.problem import Assignment, Floats, Move, PlannerCluster, PlannerJob
from unskew.analytics.planners.resihp.dp import stage_times
from unskew.analytics.planners.resihp.simulation import ReplicaSimulation


class AssignmentCost(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """`iteration_us` = slowest replica + the iteration's end; `replica_us` [dp]: inf where work cannot be done by anybody."""

    iteration_us: float
    replica_us: Floats


def cost(cluster: PlannerCluster, assignment: Assignment) -> AssignmentCost:
    """The iteration under `assignment`, at the cluster's present speeds."""
    job = cluster.job
    times = np.zeros(cluster.dp)
    alone = np.ones(cluster.dp, dtype=np.bool_)
    for component, moves in _components(assignment.moves):
        alone[component] = False
        times[component] = _shared_us(cluster, assignment, component, moves)
    times[alone] = replica_us(job, assignment.layers[alone], assignment.speeds[alone], assignment.micro_batches[alone])
    return AssignmentCost(iteration_us=float(times.max()) + job.iteration_end_us, replica_us=times)


def as_it_is(cluster: PlannerCluster, assignment: Assignment) -> Assignment:
    """The same decision with its groups' speeds as the cluster has them: what a plan made on other beliefs really is."""
    members = np.where(assignment.active, cluster.speeds, np.inf).min(axis=2)
    for entry in assignment.borrowed:
        slot = entry.replica, entry.stage
        members[slot] = min(members[slot], cluster.speeds.ravel()[entry.device])
    serving = (assignment.degrees > 0) & np.isfinite(members)
    speeds = np.where(serving, members, 0.0) * cluster.rates[assignment.degrees]
    return msgspec.structs.replace(assignment, speeds=speeds)


def holds(job: PlannerJob, assignment: Assignment) -> bool:
    """Has every group the memory for its layers and 1F1B's activations, those lent by other replicas left out?"""
    needed = members_needed(job, assignment.layers, assignment.micro_batches)
    busy = assignment.micro_batches > 0
    return needed is None or bool((needed <= assignment.degrees)[busy].all())


def _shared_us(cluster: PlannerCluster, assignment: Assignment, component: list[int], moves: list[Move]) -> list[float]:
    """The ends of replicas that execute work of each other."""
    place = {replica: number for number, replica in enumerate(component)}
    local = [Move(move.stage, place[move.source], place[move.target], move.micro_batches) for move in moves]
    forward, backward = stage_times(cluster, assignment.layers[component], assignment.speeds[component])
    counts = assignment.micro_batches[component].tolist()
    return ReplicaSimulation(forward, backward, counts, local, cluster.job.message_us).run()


def _components(moves: tuple[Move, ...]) -> list[tuple[list[int], list[Move]]]:
    """Replicas joined by moves, with the moves that join them."""
    parent: dict[int, int] = {}

    def root(replica: int) -> int:
        parent.setdefault(replica, replica)
        while parent[replica] != replica:
            parent[replica] = parent[parent[replica]]
            replica = parent[replica]
        return replica

    for move in moves:
        parent[root(move.source)] = root(move.target)
    gathered: dict[int, tuple[list[int], list[Move]]] = {}
    for replica in sorted(parent):
        gathered.setdefault(root(replica), ([], []))[0].append(replica)
    for move in moves:
        gathered[root(move.source)][1].append(move)
    return list(gathered.values())
