"""DP level: progress-aware migration between replicas, stage by stage (ResiHP, section 6.3, Algorithm 1).

While the pipelines are played (simulation.py), after every step and for each stage i:

1. ``P[d]`` = micro-batches of replica d that have passed stage i, wherever they ran, less what d has taken on there and not
   done; d_min = the least advanced that has one waiting at i which its own group cannot begin now, dead groups first; d_max =
   the most advanced of those that have memory for one more;
2. if d_min's group is dead, or ``P[d_max] - P[d_min] > delta``: d_max executes stage i of d_min's lowest waiting micro-batch,
   forward, backward and weights' gradient.

At most one micro-batch per stage and step moves. Ties for d_max: the one with fewer activations held, then the lowest number;
ties for d_min: dead before living, then the lowest number. The paper leaves both open. Of P it says "local and received"; that
the forwards count which a group has executed for anybody is the other reading, and moves work to and fro, because a slow group
can never have executed as many (docs/internals/planners.md has both beside each other).

The paper's example has delta = 0, its own value is not given; `migrate` is asked with 1 and without end (dead groups' work
only), and the plan that the simulation ends earlier under is kept.

Large jobs are cut into cells, each with its share of the weak replicas and of the strong ones; equal cells are played once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from unskew.analytics.core.layout import Move
from unskew.analytics.planners.problem import Floats, Ints, PlannerCluster, extra_layers
from unskew.analytics.planners.resihp.simulation import INFINITE, Chunk, ReplicaSimulation

CELL_REPLICAS = 16


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of Algorithm 1: stage `stage` of `micro_batch` of `source` went to `target`."""

    stage: int
    micro_batch: int
    source: int
    target: int


class Algorithm1:
    """Algorithm 1 as the watcher of a simulation. `room` [replica, stage]: sets of activations that a group can hold."""

    def __init__(self, counts: Sequence[int], delta: float, room: Ints) -> None:
        self.delta = delta
        self.room: list[list[int]] = room.tolist()
        self.decided: list[Migration] = []
        self.in_transit: list[list[Chunk]] = [[] for _ in range(room.shape[1])]
        self.counts = counts

    def __call__(self, simulation: ReplicaSimulation) -> None:
        for stage, pending in simulation.waiting():
            self._balance(simulation, stage, pending)

    def _balance(self, simulation: ReplicaSimulation, stage: int, pending: Mapping[int, int]) -> None:
        dead, progress = simulation.dead[stage], self.progress(simulation, stage)
        d_min = min(pending, key=lambda d: (not dead[d], progress[d], d))
        if not dead[d_min] and max(progress) - progress[d_min] <= self.delta:
            return
        others = (d for d in range(len(self.counts)) if d != d_min and not dead[d])
        receivers = [d for d in others if self._memory_feasible(simulation, d, stage)]
        if not receivers:
            return
        d_max = min(receivers, key=lambda d: (-progress[d], simulation.held[d][stage], d))
        if dead[d_min] or progress[d_max] - progress[d_min] > self.delta:
            chunk = (pending[d_min], d_min, stage)
            simulation.move(chunk, d_max)
            self.in_transit[stage].append(chunk)
            self.decided.append(Migration(stage=stage, micro_batch=chunk[0], source=d_min, target=d_max))

    def progress(self, simulation: ReplicaSimulation, stage: int) -> list[int]:
        """P of every replica: its micro-batches that have passed, less what it owes others."""
        if self.in_transit[stage]:
            self.in_transit[stage] = [chunk for chunk in self.in_transit[stage] if chunk not in simulation.forwarded]
        progress = [passed[stage] for passed in simulation.passed]
        for chunk in self.in_transit[stage]:
            progress[simulation.place(chunk)[0]] -= 1
        return progress

    def _memory_feasible(self, simulation: ReplicaSimulation, target: int, stage: int) -> bool:
        """Room for one more set of activations beside the target's own and those received that have not begun."""
        waiting = sum(
            simulation.place(chunk)[0] == target and chunk not in simulation.begun for chunk in self.in_transit[stage]
        )
        own = min(simulation.stages - (0 if simulation.split else stage), self.counts[target])
        return max(simulation.held[target][stage], own) + waiting + 1 <= self.room[target][stage]


def migrate(
    cluster: PlannerCluster,
    speeds: Floats,
    degrees: Ints,
    layers: Ints,
    micro_batches: Ints,
    *,
    delta: float = 1,
) -> tuple[Migration, ...]:
    """Algorithm 1 for groups of these speeds and degrees [dp, pp], layers [dp, pp] equal in all replicas."""
    chunk_us = stage_times(cluster, layers, speeds)
    if delta == INFINITE and np.isfinite(chunk_us).all():
        return ()
    room = activation_room(cluster, degrees, layers)
    found: list[Migration] = []
    known: dict[bytes, tuple[Migration, ...]] = {}
    for cell in cells(chunk_us.sum(axis=0), CELL_REPLICAS):
        key = chunk_us[:, cell].tobytes() + room[cell].tobytes() + micro_batches[cell].tobytes()
        if key not in known:
            counts = micro_batches[cell].tolist()
            rule = Algorithm1(counts, delta, room[cell])
            ReplicaSimulation(chunk_us[:, cell], counts, (), cluster.job.message_us).run(rule)
            known[key] = tuple(rule.decided)
        for entry in known[key]:
            numbers = {"source": int(cell[entry.source]), "target": int(cell[entry.target])}
            found.append(msgspec.structs.replace(entry, **numbers))
    return tuple(found)


def cells(stage_us: Floats, size: int) -> list[Ints]:
    """The replicas in cells of at most `size` that hold like shares of weak and strong ones; one cell when they are few.

    [replica, stage] times, inf for dead. Cells are made larger while one has a stage that nobody in it can do. A cell of
    replicas that are all as good as the best has nothing to move and is left out.
    """
    dead = np.isinf(stage_us)
    weight = np.where(dead, 1e18, stage_us)
    weakness = weight.max(axis=1)
    order = np.lexsort((np.arange(len(weakness)), *weight.T, -weakness))
    n_cells = -(-len(order) // size)
    dealt = [order]
    while n_cells > 1:
        dealt = [order[cell::n_cells] for cell in range(n_cells)]
        if not any(dead[cell].all(axis=0).any() for cell in dealt):
            break
        n_cells, dealt = n_cells // 2, [order]
    best = weakness.min()
    idle = [not dead[cell].any() and bool((weakness[cell] <= best * (1 + 1e-9)).all()) for cell in dealt]
    return [np.sort(cell).astype(np.int64) for cell, rests in zip(dealt, idle, strict=True) if not rests]


def moves_of(migrations: Sequence[Migration]) -> tuple[Move, ...]:
    """Migrations as a layout holds them."""
    gathered: dict[tuple[int, int, int], list[int]] = {}
    for entry in migrations:
        gathered.setdefault((entry.stage, entry.source, entry.target), []).append(entry.micro_batch)
    return tuple(Move(*key, tuple(sorted(numbers))) for key, numbers in sorted(gathered.items()))


def reroute_evenly(speeds: Floats, micro_batches: Ints) -> tuple[Move, ...]:
    """ReCycle's rule: the work of a dead group goes micro-batch by micro-batch to its living peers in turn."""
    gathered: dict[tuple[int, int, int], list[int]] = {}
    turn = 0
    for stage, home in sorted((s, d) for d, s in np.argwhere(speeds <= 0).tolist()):
        data_parallel_peers = np.flatnonzero(speeds[:, stage] > 0).tolist()
        for j in range(int(micro_batches[home])):
            if data_parallel_peers:
                gathered.setdefault((stage, home, data_parallel_peers[turn % len(data_parallel_peers)]), []).append(j)
                turn += 1
    return tuple(Move(*key, tuple(numbers)) for key, numbers in sorted(gathered.items()))


def activation_room(cluster: PlannerCluster, degrees: Ints, layers: Ints) -> Ints:
    """[dp, pp]: how many micro-batches' activations a group can hold beside its layers, recomputing where that is more."""
    job = cluster.job
    if job.capacity_bytes is None or job.activation_bytes <= 0:
        return np.full(degrees.shape, 1_000_000, dtype=np.int64)
    free = job.capacity_bytes * degrees - layers * job.layer_bytes
    room = np.floor(free / (np.maximum(layers, 1) * job.activation_bytes) + 1e-9)
    if job.given_bytes:
        rest = free - max(job.activation_bytes - job.given_bytes, 0.0)
        room = np.maximum(room, np.floor(rest / (np.maximum(layers, 1) * job.given_bytes) + 1e-9))
    return np.maximum(0, room).astype(np.int64)


def stage_times(cluster: PlannerCluster, layers: Ints, speeds: Floats) -> Floats:
    """[kind, dp, pp]: F and B, or F, B and W, of groups that keep their place in the pipeline; a stage without layers passes
    messages on."""
    job = cluster.job
    work = np.where(layers > 0, layers + extra_layers(job, cluster.pp), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(work > 0, np.where(speeds > 0, work / speeds, INFINITE), 0.0)
    return np.stack([times * each for each in job.kinds_us])
