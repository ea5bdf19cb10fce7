"""What the ranks of a run report of their work, and the controller of each iteration: telemetry."""

from __future__ import annotations

from typing import Literal

import msgspec

from unskew.collector.events.base import SpanKind, Telemetry


class Span(Telemetry, frozen=True, kw_only=True, tag="span@1", gc=False):
    """One piece of work on one rank. `start_us` and `wall_us` are in the run's clock (see `RunStarted.clock`).

    `compute_us` is the chunk's own time by the clock that works on the device; the `wait_*_us` are what it spent blocked on a
    peer of its TP, DP or PP group; `runq_us` is time runnable without a core. A transfer has `posted_us` and, as its end,
    `start_us + wall_us`; `peer` is the other side.
    """

    kind: SpanKind
    device: str
    rank: int
    plan_version: int = msgspec.field(name="epoch")
    attempt: int
    iteration: int
    start_us: int
    wall_us: int
    micro_batch: int | None = None
    first_layer: int | None = None
    n_layers: int | None = None
    group: str | None = None
    group_seq: int | None = None
    peer: int | None = None
    bytes: int | None = None
    posted_us: int | None = None
    compute_us: int | None = None
    wait_tp_us: int | None = None
    wait_dp_us: int | None = None
    wait_pp_us: int | None = None
    runq_us: int | None = None


class MicroBatchPacked(Telemetry, frozen=True, kw_only=True, tag="micro_batch@1"):
    """The document lengths (tokens) of one micro-batch; one event per (iteration, micro_batch) and attempt."""

    iteration: int
    micro_batch: int
    attempt: int
    lengths: tuple[int, ...]


class GradientsKept(Telemetry, frozen=True, kw_only=True, tag="gradients_kept@1"):
    """In-step recovery: what attempt (`plan_version`, `attempt`) has of earlier ones and did not execute for itself.

    The gradients of layers ``[first_layer, first_layer + n_layers)`` of these micro-batches, computed under `of_plan_version`;
    a plan version has one attempt at an iteration at most.
    """

    iteration: int
    plan_version: int = msgspec.field(name="epoch")
    attempt: int
    first_layer: int
    n_layers: int
    of_plan_version: int
    micro_batches: tuple[int, ...]


class QuorumFormed(Telemetry, frozen=True, kw_only=True, tag="quorum_formed@1"):
    """FT-HSDP's rules: who takes part in an iteration, decided before it begins (analytics/scheduler/quorum.py).

    `replicas`, `proposed`, `states` in one order: whom it is of, the iteration that each proposed, what each is. `sources`: for
    each replica that is behind, in their order, the one whose state it fetches. `fast`: all had proposed while they computed
    the iteration before. `waited_us` from the first proposal to the last.
    """

    iteration: int
    plan_version: int = msgspec.field(name="epoch")
    attempt: int
    replicas: tuple[int, ...]
    proposed: tuple[int, ...]
    states: tuple[Literal["healthy", "behind"], ...]
    sources: tuple[int, ...]
    fast: bool
    waited_us: int


ReplicaStepState = Literal["healthy", "fetching", "zero_grad", "rejoined"]


class ReplicaStep(Telemetry, frozen=True, kw_only=True, tag="replica_step@1", gc=False):
    """FT-HSDP's rules: what a rank's replica did in one attempt at an iteration.

    `state`: healthy; or it took part with zero gradients, and has no state yet (fetching), has it and steps with the others
    (rejoined), or had it before (zero_grad). `exchanged`: on this rank all gradients were summed over the replicas.
    `committed`: so it was on all ranks of the replica, and it stepped. `position` batches of the replica's stream were trained
    before; `tokens` of its own were trained now, `divisor` is what the sum of all gradients was divided by, `healthy` replicas
    contributed; the learning rate was multiplied by `lr_factor`. `source` is the rank whose state was fetched. `digest`: of
    layers and optimiser after the step, where a replica was behind and at the end.
    """

    iteration: int
    plan_version: int = msgspec.field(name="epoch")
    attempt: int
    rank: int
    replica: int
    state: ReplicaStepState
    exchanged: bool
    committed: bool
    position: int
    tokens: int
    divisor: int
    healthy: int
    lr_factor: float = 1.0
    source: int | None = None
    fetched_bytes: int = 0
    fetch_us: int = 0
    quorum_wait_us: int = 0
    exchange_us: int = 0
    digest: str = ""


class IterationCommitted(Telemetry, frozen=True, kw_only=True, tag="iteration_committed@1", gc=False):
    """This rank has stepped iteration `iteration`: the Detector's watermark.

    Every rank writes its own; all but `rank` and times are equal by the commit protocol, so any one suffices.
    (`plan_version`, `attempt`) is the attempt that counted; `log_complete` means that every rank's chunks of the iteration had
    been handed to the kernel before its gradients were reduced. `tokens` are target tokens, `loss` is nats per target token.
    `cpu_us`: for how long its chunks worked on a core (None = not measured, or elsewhere); a slow rank may only have waited.
    `forward_own_us`, `backward_own_us`: what a chunk took by itself, beside its layers, in the median (None = not measured).
    """

    iteration: int
    plan_version: int = msgspec.field(name="epoch")
    attempt: int
    rank: int
    loss: float
    tokens: int
    start_us: int
    wall_us: int
    log_complete: bool
    cpu_us: int | None = None
    forward_own_us: int | None = None
    backward_own_us: int | None = None


class Heartbeat(Telemetry, frozen=True, kw_only=True, tag="heartbeat@1", gc=False):
    """What the agent knows of a rank, once a second; `activity` is one of runtime/rank/progress.py's.

    `longest_gap_us`: the longest pause between two heartbeats since the last such event. `peak_bytes`: the most memory so far,
    of the process, or of its GPU in tensors (None = not measured).
    """

    rank: int
    pid: int
    iteration: int
    progress: int
    activity: str
    age_us: int
    stalled_us: int
    waits_for: int | None = None
    longest_gap_us: int | None = None
    peak_bytes: int | None = None


class RankRatio(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A rank's chunk times of one iteration over `healthy_us`, what a healthy device would take; None = it executed none of
    that kind."""

    rank: int
    measured_us: int
    healthy_us: int = msgspec.field(name="predicted_us")
    f: float | None = None
    b: float | None = None
    w: float | None = None
    score: float = 0.0


class IterationJudged(Telemetry, frozen=True, kw_only=True, tag="iteration_judged@1"):
    """The Detector's view of one committed iteration: everything that led to a verdict or to none.

    `predicted_us`: what this iteration was to take at the estimated speeds. `log_complete` False: chunks were missing when
    patience ended, or are those of several attempts, and nobody was judged by it.
    """

    iteration: int
    plan_version: int = msgspec.field(name="epoch")
    measured_us: int
    predicted_us: int | None = None
    ranks: tuple[RankRatio, ...] = ()
    log_complete: bool = True


class GpuState(Telemetry, frozen=True, kw_only=True, tag="gpu_state@1"):
    """What a rank's GPU reports about itself, in every fourth iteration and beside a probe; None = not reported.
    `held_down_by`: why its clock is low; `iteration`: in or before which it was asked."""

    rank: int
    iteration: int | None = None
    clock_mhz: int | None = None
    highest_clock_mhz: int | None = None
    held_down_by: tuple[str, ...] = ()
    temperature_c: int | None = None
    uncorrected_errors: int | None = None


class Dropped(Telemetry, frozen=True, kw_only=True, tag="dropped@1"):
    """A writer's buffer was full: `count` events were discarded before this one, of each of `types` (tags without their
    versions) so many; a line of an older version does not say of which."""

    count: int
    types: dict[str, int] = msgspec.field(default_factory=dict)
