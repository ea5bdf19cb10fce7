"""The planners' view of a big job: replicas x stages x tensor-parallel members as arrays, and what is done with them.

A device is a number in an array: ``(replica * pp + stage) * tp + shard`` as ranks are numbered. A `PlannerCluster` is what is
given (job, speeds, nodes); what is decided is a `Layout` (core/layout.py). The speed and degree of a group follow from
its members, so that a plan made on other estimates is priced at what its devices really do.

Speed is 1.0 for a healthy device and 0.0 for a dead one. A stage's speed is relative to a healthy group of the nominal degree:
``efficiency[k - 1] x slowest member``, where ``efficiency[k - 1]`` is what k healthy devices reach (measured; k / tp if not
given).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.layout import PACE, Layout, Move, Pipeline, uniform_layout
from unskew.analytics.core.plan import PlanError, splits_backward

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class PlannerJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, per layer and micro-batch on a healthy group of the nominal degree.

    `backward_us` is both halves of the backward, which `schedule` (1f1b, zb-h1) splits or not. `embedding_layers`,
    `head_layers`: what the first and the last stage do beside their layers, in layers; `own_layers`: what each stage with
    layers does beside them, for a chunk takes some time by itself (as its layers it is taken to be longer in a group of
    fewer members, where core/cost.py has it the same: plans are priced by that). Memory (None = without limit):
    `layer_bytes` parameters, gradients and optimiser state of a layer, `activation_bytes` of a layer and a micro-batch in
    flight, both for the whole group and shared by its members; `ends_bytes` of embedding and head, where they are no part of
    each layer's. `given_bytes`: what a layer is given of a micro-batch, which is
    all that a stage keeps in flight that recomputes for want of room; None = none can.
    """

    n_layers: int
    micro_batches: int
    forward_us: float = 1.0
    backward_us: float = 2.0
    embedding_layers: float = 0.0
    head_layers: float = 0.0
    own_layers: float = 0.0
    message_us: float = 0.0
    iteration_end_us: float = 0.0
    layer_bytes: float = 0.0
    ends_bytes: tuple[float, float] = (0.0, 0.0)
    activation_bytes: float = 0.0
    given_bytes: float | None = None
    capacity_bytes: float | None = None
    schedule: str = "1f1b"

    @property
    def splits(self) -> bool:
        """Whether the schedule splits the backward pass."""
        return splits_backward(self.schedule)

    @property
    def kinds_us(self) -> tuple[float, ...]:
        """F and B of a layer, or F, B and W where the schedule splits the backward pass (into equal halves)."""
        if self.splits:
            return self.forward_us, self.backward_us / 2, self.backward_us / 2
        return self.forward_us, self.backward_us

    @property
    def layer_us(self) -> float:
        """F + B of one layer and micro-batch."""
        return self.forward_us + self.backward_us

    @property
    def again_rate(self) -> float:
        """The speed of a stage that recomputes over that of one that does not."""
        return self.layer_us / (self.layer_us + self.forward_us)

    def stage_bytes(self, layers: Ints, in_flight: Ints, *, again: bool = False) -> Floats:
        """What stages of so many layers take with so many micro-batches in flight; `again`: recomputing, where that can be."""
        if not again or self.given_bytes is None:
            return np.asarray(layers * (self.layer_bytes + in_flight * self.activation_bytes))
        one = max(self.activation_bytes - self.given_bytes, 0.0)
        return np.asarray(layers * (self.layer_bytes + in_flight * self.given_bytes) + (layers > 0) * one)


class PlannerCluster(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The devices of a job: `speeds` [dp, pp, tp]; `nodes` [dp, pp, tp] (None: every group is a node of its own).

    `efficiency[k - 1]`: throughput of k healthy devices over that of tp healthy devices, for k = 1..tp.
    """

    job: PlannerJob
    speeds: Floats
    nodes: Ints | None = None
    efficiency: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.speeds.ndim != 3:
            raise PlanError(f"speeds must be [replicas, stages, members], not {self.speeds.ndim}-dimensional")
        if self.efficiency and len(self.efficiency) != self.tp:
            raise PlanError(f"efficiency needs one figure per degree 1..{self.tp}, not {len(self.efficiency)}")
        if self.job.n_layers < self.pp:
            raise PlanError(f"{self.job.n_layers} layers cannot fill {self.pp} stages")
        if self.job.micro_batches < self.dp:
            raise PlanError(f"{self.job.micro_batches} micro-batches cannot feed {self.dp} replicas")

    @property
    def dp(self) -> int:
        return int(self.speeds.shape[0])

    @property
    def pp(self) -> int:
        return int(self.speeds.shape[1])

    @property
    def tp(self) -> int:
        return int(self.speeds.shape[2])

    @property
    def rates(self) -> Floats:
        """[tp + 1]: what k healthy devices reach, k = 0..tp; linear where nothing was measured."""
        measured = self.efficiency or tuple(k / self.tp for k in range(1, self.tp + 1))
        return np.array([0.0, *measured])

    def with_speeds(self, speeds: Floats) -> PlannerCluster:
        """The same job on devices of other speeds."""
        return msgspec.structs.replace(self, speeds=np.asarray(speeds, dtype=np.float64))


def healthy_cluster(
    job: PlannerJob, *, tp: int, pp: int, dp: int, devices_per_node: int | None = None, efficiency: Sequence[float] = ()
) -> PlannerCluster:
    """All devices at speed 1.0; nodes take `devices_per_node` devices in the order of their numbers."""
    nodes = None
    if devices_per_node is not None:
        nodes = (np.arange(dp * pp * tp, dtype=np.int64) // devices_per_node).reshape(dp, pp, tp)
    return PlannerCluster(job=job, speeds=np.ones((dp, pp, tp)), nodes=nodes, efficiency=tuple(efficiency))


def start(cluster: PlannerCluster) -> Layout:
    """What a job starts with: everybody works, layers and micro-batches split evenly."""
    job = cluster.job
    return uniform_layout(
        tp=cluster.tp, pp=cluster.pp, replicas=range(cluster.dp), n_layers=job.n_layers, micro_batches=job.micro_batches
    )


def layout_of(members: Ints, layers: Ints, micro_batches: Ints, moves: tuple[Move, ...] = ()) -> Layout:
    """What was decided for the groups [replica, stage]; `members` [replica, stage, any] are device numbers, -1 = none."""
    rows = zip(np.sort(members, axis=2).tolist(), layers.tolist(), micro_batches.tolist(), strict=True)
    return Layout(
        tuple(
            Pipeline(replica, tuple(tuple(device for device in group if device >= 0) for group in groups), tuple(sizes), count)
            for replica, (groups, sizes, count) in enumerate(rows)
        ),
        moves,
    )


def group_speeds(cluster: PlannerCluster, layout: Layout) -> Floats:
    """[pipeline, stage]: what the layout's groups reach at the cluster's present speeds; a dead member stops its group, and
    one that recomputes takes longer."""
    speeds = layout.slowest(cluster.speeds.ravel()) * cluster.rates[layout.degrees]
    job = cluster.job
    if job.capacity_bytes is None or job.given_bytes is None:
        return np.asarray(speeds)
    counts = np.array([pipeline.micro_batches for pipeline in layout.pipelines], dtype=np.int64)
    needed = job.stage_bytes(layout.layers, in_flight_of(layout.layers, counts))
    return np.where(needed > job.capacity_bytes * layout.degrees * (1 + 1e-9), speeds * job.again_rate, speeds)


def in_flight_of(layers: Ints, micro_batches: Ints) -> Ints:
    """[..., stages]: micro-batches that stages have begun and not ended at most, under 1F1B; those without layers are none."""
    order = np.cumsum(layers > 0, axis=-1)
    return np.asarray(np.minimum(order[..., -1:] - order + 1, np.maximum(np.asarray(micro_batches)[..., None], 1)))


def scheduled(cluster: PlannerCluster, layout: Layout) -> Layout:
    """The layout under the job's schedule; where list scheduling orders the chunks, with the pace of each stage."""
    job = cluster.job
    if not (job.splits or layout.moves):
        return msgspec.structs.replace(layout, schedule=job.schedule)
    rows = group_speeds(cluster, layout).tolist()
    pipelines = tuple(
        msgspec.structs.replace(pipeline, paces=_paces(job, pipeline.layers, speeds))
        for pipeline, speeds in zip(layout.pipelines, rows, strict=True)
    )
    return msgspec.structs.replace(layout, pipelines=pipelines, schedule=job.schedule)


def working(cluster: PlannerCluster, layout: Layout) -> Layout:
    """The layout as the job's schedule executes it, without replicas that do nothing, for themselves or for others."""
    needed = {move.target for move in layout.moves}
    pipelines = (one for one in scheduled(cluster, layout).pipelines if one.micro_batches or one.replica in needed)
    return msgspec.structs.replace(layout, pipelines=tuple(pipelines), schedule=cluster.job.schedule)


def _paces(job: PlannerJob, layers: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...]:
    """What a layer takes at each stage, with what the stage does beside its layers; () where all are alike."""
    used = [stage for stage, size in enumerate(layers) if size]
    extra = dict.fromkeys(used, job.own_layers)
    if used:
        extra[used[0]] += job.embedding_layers
        extra[used[-1]] += job.head_layers
    found = tuple(
        round(PACE * (1.0 + extra[stage] / size) / speed) if size and speed > 0 else PACE
        for stage, (size, speed) in enumerate(zip(layers, speeds, strict=False))
    )
    return found if len(set(found)) > 1 else ()


def layer_limits(job: PlannerJob, degrees: Ints, in_flight: Ints | int, besides_bytes: Floats | float = 0.0) -> Ints:
    """The most layers that groups of these degrees can hold with so many micro-batches in flight (any shape), and so much
    besides."""
    if job.capacity_bytes is None:
        return np.full(np.shape(degrees), job.n_layers, dtype=np.int64)
    capacity, kept_forms = job.capacity_bytes * np.asarray(degrees) - besides_bytes, [(job.activation_bytes, 0.0)]
    if job.given_bytes is not None:
        kept_forms.append((job.given_bytes, max(job.activation_bytes - job.given_bytes, 0.0)))
    most = [
        np.floor((capacity - once) / np.maximum(job.layer_bytes + np.asarray(in_flight) * each, 1e-9) + 1e-9)
        for each, once in kept_forms
    ]
    return np.asarray(np.clip(np.maximum.reduce(most), 0, job.n_layers)).astype(np.int64)


def extra_layers(job: PlannerJob, stages: int) -> Floats:
    """[stages]: what each stage does beside its layers, in layers."""
    extra = np.full(stages, job.own_layers)
    extra[0] += job.embedding_layers
    extra[-1] += job.head_layers
    return extra


Level = Literal["tp", "pp", "dp"]
