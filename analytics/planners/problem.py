"""The planners' view of a big job: replicas x stages x tensor-parallel members as arrays, and what is done with them.

A `Plan` names every rank and every micro-batch, which is right for executing and too much for 98,304 devices. Here a device
is a number in an array: device ``(replica * pp + stage) * tp + shard`` as ranks are numbered. A `PlannerCluster` is what is
given (job, speeds, nodes), an `Assignment` what is decided (who is active, layers per stage and replica, micro-batches per
replica, work moved between replicas). `to_plan` (planners/conversion.py) makes the runtime's plan of it.

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

from unskew.analytics.core.plan import PlanError, split_evenly

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class PlannerJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, per layer and micro-batch on a healthy group of the nominal degree.

    `backward_us` is both halves of the backward. `embedding_layers`, `head_layers`: what the first and the last stage do beside
    their layers, in layers. Memory (None = without limit): `layer_bytes` parameters, gradients and optimiser state of a layer,
    `activation_bytes` of a layer and a micro-batch in flight, both for the whole group and shared by its members.
    """

    n_layers: int
    micro_batches: int
    forward_us: float = 1.0
    backward_us: float = 2.0
    embedding_layers: float = 0.0
    head_layers: float = 0.0
    message_us: float = 0.0
    iteration_end_us: float = 0.0
    layer_bytes: float = 0.0
    activation_bytes: float = 0.0
    capacity_bytes: float | None = None

    @property
    def layer_us(self) -> float:
        """F + B of one layer and micro-batch."""
        return self.forward_us + self.backward_us


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


class BorrowedDevice(msgspec.Struct, frozen=True, gc=False):
    """A standby device (its number) that serves in the group of another (replica, stage) of its node."""

    replica: int
    stage: int
    device: int


class Move(msgspec.Struct, frozen=True, gc=False):
    """Stage `stage` of these micro-batches (numbered within their home `source`) is executed by replica `target`."""

    stage: int
    source: int
    target: int
    micro_batches: tuple[int, ...]


class Assignment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Who does what: arrays over [replica, stage (, member)].

    `active`: home members that serve in their own group; `borrowed`: others that do. `speeds` and `degrees` of the groups
    follow from them. `layers` sum to the job's in every replica that executes anything (0: the stage is left out),
    `micro_batches` to the job's over the replicas.
    """

    active: Bools
    borrowed: tuple[BorrowedDevice, ...] = ()
    speeds: Floats
    degrees: Ints
    layers: Ints
    micro_batches: Ints
    moves: tuple[Move, ...] = ()

    def standby(self, cluster: PlannerCluster) -> NDArray[np.int64]:
        """Numbers of the living devices that do nothing."""
        idle = ~self.active & (cluster.speeds > 0)
        lent = [entry.device for entry in self.borrowed]
        return np.setdiff1d(np.flatnonzero(idle.ravel()), lent).astype(np.int64)


def start(cluster: PlannerCluster) -> Assignment:
    """What a job starts with: everybody active, layers and micro-batches split evenly, at the devices' present speeds.

    A group with a dead member has speed 0: it cannot work as it stands.
    """
    slowest = cluster.speeds.min(axis=2)
    return Assignment(
        active=cluster.speeds > 0,
        speeds=slowest * cluster.rates[-1],
        degrees=np.where(slowest > 0, cluster.tp, 0).astype(np.int64),
        layers=np.tile(np.array(split_evenly(cluster.job.n_layers, cluster.pp), dtype=np.int64), (cluster.dp, 1)),
        micro_batches=np.array(split_evenly(cluster.job.micro_batches, cluster.dp), dtype=np.int64),
    )


def layer_limits(job: PlannerJob, degrees: Ints, in_flight: Ints | int) -> Ints:
    """The most layers that groups of these degrees can hold with so many micro-batches in flight (any shape)."""
    if job.capacity_bytes is None:
        return np.full(np.shape(degrees), job.n_layers, dtype=np.int64)
    per_layer = job.layer_bytes + np.asarray(in_flight) * job.activation_bytes
    room = np.floor(job.capacity_bytes * np.asarray(degrees) / np.maximum(per_layer, 1e-9) + 1e-9)
    return np.minimum(room, job.n_layers).astype(np.int64)


def extra_layers(job: PlannerJob, stages: int) -> Floats:
    """[stages]: what each stage does beside its layers, in layers."""
    extra = np.zeros(stages)
    extra[0] += job.embedding_layers
    extra[-1] += job.head_layers
    return extra


Level = Literal["tp", "pp", "dp"]
