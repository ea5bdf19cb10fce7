"""A training job as the simulator sees it: model, layout, micro-batches, and what a layer costs on a healthy device.

A device is a slot: ``(replica * PP + stage) * TP + shard``; a node is ``device // gpus_per_node``. A slot keeps its number when
its hardware is replaced.

>>> job = JOBS["llama2-7b"]
>>> job.devices, job.micro_batches, job.device(1, 1, 3)
(16, 8, 15)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache

import msgspec

from unskew.analytics.core.constants import constant
from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.layout import Layout, uniform_layout
from unskew.analytics.core.workload import Work
from unskew.data import table


class ChunkTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of a job, in us and per micro-batch on a whole, healthy group: F and B (both halves) of a layer and of
    the output head, a message, and the end of an iteration."""

    forward_us: float
    backward_us: float
    head_forward_us: float = 0.0
    head_backward_us: float = 0.0
    message_us: float = 0.0
    iteration_end_us: float = 0.0


class Job(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """`micro_batches` per iteration of the whole job, each of `sequences` x `seq` tokens; `parameters` of the whole model;
    `schedule` of its pipelines, 1f1b or zb-h1; `source` of all this.

    `given_iteration_s`: the fault-free iteration when it is published; `measured`: what a run has measured of its own;
    otherwise costs follow from FLOPs and constants. `tp_slowdowns[k - 1]`: how many times longer a layer takes on k devices
    than on all; () = as Malleus measured it. `rank_room_bytes`: for how much of layers a device has memory, where that is
    known; otherwise an A100's. `end_parameters` of embedding and head; None = as many as the vocabulary asks for.
    """

    name: str = ""
    tp: int
    dp: int
    pp: int
    n_layers: int
    hidden: int
    heads: int
    parameters: float
    micro_batches: int
    seq: int = 8192
    sequences: int = 1
    vocab: int = 32000
    peak: str = "peak_flops_a100"
    schedule: str = "1f1b"
    given_iteration_s: float | None = None
    measured: ChunkTimes | None = None
    tp_slowdowns: tuple[float, ...] = ()
    rank_room_bytes: float | None = None
    end_parameters: tuple[float, float] | None = None
    source: str = ""

    @property
    def devices(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        return int(constant("gpus_per_node"))

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.micro_batches * self.sequences * self.seq

    @property
    def flops(self) -> float:
        """Model FLOPs of an iteration: 6 per parameter and token, and causal attention's 6 x layers x hidden x seq."""
        return self.tokens * (6.0 * self.parameters + 6.0 * self.n_layers * self.hidden * self.seq)

    def device(self, replica: int, stage: int, shard: int) -> int:
        return (replica * self.pp + stage) * self.tp + shard

    def group(self, replica: int, stage: int) -> tuple[int, ...]:
        """The devices of one stage of one replica."""
        first = self.device(replica, stage, 0)
        return tuple(range(first, first + self.tp))

    def home(self, device: int) -> tuple[int, int]:
        """(replica, stage) of a slot."""
        return divmod(device // self.tp, self.pp)

    def node(self, device: int) -> int:
        return device // self.gpus_per_node

    @cached_property
    def work(self) -> Work:
        return Work(self.seq, self.seq * self.seq)

    @cached_property
    def cost(self) -> CostModel:
        """What chunks cost a whole, healthy TP group, in us; where nothing was measured B, both halves, takes twice as long as
        F, and the head what its FLOPs are."""
        if self.measured is not None:
            return self._measured_cost(self.measured)
        if self.given_iteration_s is not None:
            per_replica = self.micro_batches / self.dp
            stages = per_replica + self.pp - 1
            layer_us = self.given_iteration_s * 1e6 / (3.0 * stages * self.n_layers / self.pp)
            head_us, message_us, end_us = 0.0, 0.0, 0.0
        else:
            rate = constant(self.peak) * constant("kernel_efficiency") * self.tp
            layer_parameters = self.parameters / self.n_layers
            tokens = self.sequences * self.seq
            layer_us = tokens * (2.0 * layer_parameters + 2.0 * self.hidden * self.seq) / rate * 1e6
            head_us = tokens * 2.0 * self.vocab * self.hidden / rate * 1e6
            message_us = tokens * self.hidden * 2.0 / self.tp / constant("link_bytes_per_s") * 1e6
            reduced = 2.0 * self.parameters * 2.0 / (self.tp * self.pp) * (self.dp - 1) / self.dp
            exposed = reduced / constant("link_bytes_per_s") * (1.0 - constant("gradient_overlap"))
            end_us = (exposed + constant("optimizer_s")) * 1e6
        forward = ChunkCost(layer_us=layer_us, token_us=0.0, token2_us=0.0, head_us_per_token=head_us / self.seq)
        return CostModel(chunks={"F": forward, "B": forward.times(2)}, message_us=message_us, iteration_end_us=end_us)

    def _measured_cost(self, times: ChunkTimes) -> CostModel:
        def cost(layer_us: float, head_us: float) -> ChunkCost:
            return ChunkCost(layer_us=layer_us, token_us=0.0, token2_us=0.0, head_us_per_token=head_us / self.seq)

        forward, backward = cost(times.forward_us, times.head_forward_us), cost(times.backward_us, times.head_backward_us)
        return CostModel(
            chunks={"F": forward, "B": backward}, message_us=times.message_us, iteration_end_us=times.iteration_end_us
        )

    @cached_property
    def room_bytes(self) -> float:
        """For how much of parameters, gradients and optimiser state a device has memory."""
        if self.rank_room_bytes is not None:
            return self.rank_room_bytes
        return constant("hbm_gib_a100") * 2**30 * constant("memory_share")

    @cached_property
    def least_tp(self) -> int:
        """The smallest TP degree whose shard of a stage fits the memory (equation 3's k_min)."""
        stage_bytes = self.parameters / self.pp * constant("bytes_per_parameter")
        return next((k for k in range(1, self.tp + 1) if stage_bytes / k <= self.room_bytes), self.tp)

    @cached_property
    def most_layers(self) -> int:
        """How many layers a whole TP group can hold: parameters, gradients and optimiser state."""
        layer_bytes = self.parameters / self.n_layers * constant("bytes_per_parameter") / self.tp
        return int(self.room_bytes / layer_bytes)


@lru_cache(maxsize=64)
def healthy(job: Job) -> Layout:
    """The layout that a job starts with.

    >>> layout = healthy(JOBS["llama2-7b"])
    >>> [pipeline.layers for pipeline in layout.pipelines], layout.micro_batches
    ([(16, 16), (16, 16)], 8)
    """
    return uniform(job, range(job.dp))


def uniform(job: Job, replicas: Iterable[int], *, micro_batches: int | None = None) -> Layout:
    """These replicas, whole, with even layers and micro-batches (of the whole job unless given). Raises `PlanError`."""
    total = job.micro_batches if micro_batches is None else micro_batches
    return uniform_layout(
        tp=job.tp, pp=job.pp, replicas=replicas, n_layers=job.n_layers, micro_batches=total, schedule=job.schedule
    )


JOBS = {name: msgspec.structs.replace(job, name=name) for name, job in table("clusters", dict[str, Job]).items()}
"""The layouts of the papers (data/clusters.toml)."""
