"""The vocabulary of the event log: every event type, frozen, with its schema version in its tag.

A tag is ``name@version`` (``span@1``). A line of a spool file is one JSON object: the envelope's fields (`seq`, `at_us` and,
for control events, `stream`, `version`, `actor`) followed by the event's own. Run and writer are in the file's path, not in
every line. Fields at their default are left out; a reader takes an absent field as its default.

Two classes (docs/reference/events.md):

* telemetry: high rate, key (run, writer, seq), may be dropped under pressure, and then a `Dropped` has their number;
* control: low rate, written and fsynced at once to a stream with versions, never dropped.

Units are in the names; durations and times are microseconds. `None` means not measured, `0.0` a measured zero.
This module imports nothing of the project.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

ChunkKind = Literal["F", "B", "W"]
"""Forward, backward, gradient of weights; where a schedule has no W of its own, B is the whole backward pass."""
CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]
SpanKind = Literal[
    ChunkKind,
    "send",
    "recv",
    CollectiveKind,
    "optimizer",
    "data_wait",
    "other",
    "gc",
    "checkpoint",
    "evaluation",
    "probe",
    "regroup",
    "migrate",
]
"""Other: what a loop that is not ours did between the work that is known by a name."""
PAUSES: frozenset[SpanKind] = frozenset({"gc", "checkpoint", "evaluation"})
"""What a loop that is not ours does between its steps, or within another piece of work, of whose time it is no part then."""
CHUNK_KINDS: tuple[ChunkKind, ...] = get_args(ChunkKind)
CHUNK_NAMES: dict[str, str] = {"F": "forward", "B": "backward", "W": "weight gradients"}
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
Cause = Literal[
    "slow_device", "slow_link", "dead", "hung", "long_sequences", "stage_imbalance", "input_bound", "gc_pause", "unknown"
]
Mode = Literal["observe", "approve", "auto"]
FaultKind = Literal["slow", "slow_link", "kill", "hang", "freeze", "exception", "segfault", "full_disk", "rejoin"]
SlowPart = Literal["compute", "memory"]
DeviceKind = Literal["cores", "gpus", "sleep", "virtual"]
DEVICE_NAMES: dict[DeviceKind | None, str] = {"cores": "real", "gpus": "real", "sleep": "sleep", "virtual": "virtual"}
"""What executes a run, in a word. A run that is no training has its own: simulated, imported."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of every event."""


class Telemetry(Event, frozen=True, kw_only=True):
    """Base of the events that may be dropped under pressure."""


class Control(Event, frozen=True, kw_only=True):
    """Base of the events that are never dropped."""


# --- telemetry -------------------------------------------------------------------------------------------------------


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

    Every rank writes its own; all but `rank`, `start_us`, `wall_us` are equal by the commit protocol, so any one suffices.
    (`plan_version`, `attempt`) is the attempt that counted; `log_complete` means that every rank's chunks of the iteration had
    been handed to the kernel before its gradients were reduced. `tokens` are target tokens, `loss` is nats per target token.
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


class Heartbeat(Telemetry, frozen=True, kw_only=True, tag="heartbeat@1", gc=False):
    """What the agent knows of a rank, once a second; `activity` is one of runtime/rank/progress.py's.

    `longest_gap_us`: the longest pause between two heartbeats since the last such event.
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


class PipelinePlace(msgspec.Struct, frozen=True, array_like=True):
    """The stage of a rank, of how many in its pipeline, and the ranks of this one."""

    stage: int
    stages: int
    members: tuple[int, ...]


class RankAttached(Telemetry, frozen=True, kw_only=True, tag="rank_attached@1"):
    """A process of a training that is not ours begins to be measured, as rank `rank` of `ranks`.

    `groups`: the members of its process groups that are smaller than the job, `dimensions`: of each the name that its
    `DeviceMesh` has for it, "" = it is of none; `pipeline`: its place in one (None = there is none); `off`: what cannot be
    measured, a sentence each.
    """

    rank: int
    ranks: int
    node: str
    pid: int
    on_gpu: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    off: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = ()
    pipeline: PipelinePlace | None = None


class RankDetached(Telemetry, frozen=True, kw_only=True, tag="rank_detached@1"):
    """The process of a `RankAttached` ends, by itself; `error`: the exception that ends it, "" = none."""

    rank: int
    pid: int
    error: str = ""


class LoaderDivided(Telemetry, frozen=True, kw_only=True, tag="loader_divided@1"):
    """A rank of a training that is not ours iterates over `session.balance(loader)`: what can be divided there, and how.

    `samples`: rank -> how many of a global batch it is given by the loader; `window`: over how many batches lengths may be
    balanced; `lengths`: whether they are known; `loss`: the mean over the rank's own samples, divided by all ranks', or not
    known; `by_tokens`: the mean is over tokens; `leaves`: the rank could leave the living job.
    """

    rank: int
    samples: tuple[int, ...]
    window: int
    lengths: bool
    loss: Literal["mean", "global", "unknown"]
    by_tokens: bool = False
    leaves: bool = False


class SamplesDrawn(Telemetry, frozen=True, kw_only=True, tag="samples_drawn@1", gc=False):
    """The lengths of the samples of the global batches that all ranks train from iteration `iteration` on, each in the loader's
    order; the lowest rank writes it."""

    iteration: int
    batches: tuple[tuple[int, ...], ...]


class HostClock(Telemetry, frozen=True, kw_only=True, tag="host_clock@1"):
    """How far a node's wall clock is ahead of the controller's (negative: behind), from the handshake; true to `within_us`.

    `at_us` of this node's writers minus `offset_us` is the controller's time.
    """

    node: str
    offset_us: int
    within_us: int


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


class IterationTimed(Telemetry, frozen=True, kw_only=True, tag="iteration_timed@1", gc=False):
    """How long an iteration of an imported run took, where its source has it; `rank` None = the job as a whole.

    `start_us` counts from where the source's own clock does; `loss` is as the source reports it. `attempt`: a restarted job
    executes an iteration again, and its last attempt counts.
    """

    iteration: int
    wall_us: int
    rank: int | None = None
    start_us: int | None = None
    loss: float | None = None
    tokens: int | None = None
    sequences: int | None = None
    attempt: int = 0


class SourceRecorded(Telemetry, frozen=True, kw_only=True, tag="source_recorded@1", gc=False):
    """One record of an imported trace for which no other event has a place: a kernel, an annotation, a marker, a scalar.

    `category` and `track` (thread, stream, task) are the source's words. `wall_us` None = a point in time.
    """

    rank: int
    name: str
    category: str
    start_us: int
    iteration: int | None = None
    wall_us: int | None = None
    track: str = ""
    value: float | None = None


class OperationsRecorded(Telemetry, frozen=True, kw_only=True, tag="operations_recorded@1"):
    """An imported rank's iteration in its source's own words and numbers: column by column, in the source's order of rows.

    The n-th of each list is one operation, which is also a `Span` (in microseconds; `group` = name, `group_seq` = sequence).
    -1 where the source has none: `chunk` (model chunk on its stage), `global_chunk` (in the model), `micro_batch`.
    """

    iteration: int
    rank: int
    replica: int
    stage: int
    name: tuple[str, ...]
    start_s: tuple[float, ...]
    duration_s: tuple[float, ...]
    sequence: tuple[int, ...]
    chunk: tuple[int, ...]
    global_chunk: tuple[int, ...]
    micro_batch: tuple[int, ...]


class CollectiveRecorded(Telemetry, frozen=True, kw_only=True, tag="collective_recorded@1"):
    """One entry of a rank's flight recorder: how far a collective or message had come when the buffer was written.

    Of all entries of a process group, those with the same `group_seq` (`p2p_seq` for messages) are the same operation on
    different ranks. Times are the source's wall clock; None = did not happen, or was not noticed.
    """

    rank: int
    record: int
    group: str
    group_description: str
    group_seq: int
    op: str
    state: Literal["scheduled", "started", "completed"]
    p2p_seq: int | None = None
    op_id: int | None = None
    is_p2p: bool = False
    retired: bool | None = None
    created_us: int | None = None
    started_us: int | None = None
    completed_us: int | None = None
    wall_us: int | None = None
    timeout_us: int | None = None
    input_sizes: str = ""
    output_sizes: str = ""
    dtypes: str = ""


class GroupRecorded(Telemetry, frozen=True, kw_only=True, tag="group_recorded@1"):
    """A process group as one rank's flight recorder knows it: its members and the last collective it saw reach each state.

    -1 = none yet, None = not in the dump. A dump has members by the group's name and states by a number of its own
    (`group_id`); where no entry ties the two together, `group` is "" and `members` empty in the event with the states.
    """

    rank: int
    group: str = ""
    group_id: str = ""
    group_description: str = ""
    members: tuple[int, ...] = ()
    last_enqueued: int | None = None
    last_started: int | None = None
    last_completed: int | None = None


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
    types: dict[str, int] = {}


# --- control: the run ------------------------------------------------------------------------------------------------


class RunStarted(Control, frozen=True, kw_only=True, tag="run_started@1"):
    """`options` are those of `unskew run`; `clock` is monotonic, virtual or imported; `code` hashes the deciding modules.

    `device` is a sentence for people; `device_kind` says what executes: CPU cores, a GPU to each rank, or an emulation; None =
    nothing that is known. The project's `version` has another name in a line, where `version` is the stream's. `resumed_from`:
    the run that this one goes on with, from its checkpoint after `first_iteration` iterations.
    """

    run: str
    device: str
    clock: Literal["monotonic", "virtual", "imported"]
    mode: Mode
    ranks: int
    options: dict[str, Any]
    code: str
    version: str = msgspec.field(name="unskew_version")
    device_kind: DeviceKind | None = None
    resumed_from: str | None = None
    first_iteration: int = 0


class RunFinished(Control, frozen=True, kw_only=True, tag="run_finished@1"):
    """How a run ended; incomplete = it was trained to its end, and its log is not whole.

    `iterations`: those that the log holds; `committed`: those that ranks report to have committed, None = nobody was asked;
    `unwritten`: events that could not be written.
    """

    status: Literal["done", "failed", "stopped", "incomplete"]
    iterations: int
    reason: str = ""
    committed: int | None = None
    unwritten: int = 0


class RankAdded(Control, frozen=True, kw_only=True, tag="rank_added@1"):
    """A process is about to be started for a rank that was lost, or for a new one; `DeviceJoined` follows when it is there.

    `process`: the how manieth of this rank in the run, from 1; `by`: auto, or the name that somebody gave (`user` as in
    `ModeChanged`); `watermark` as in `DeviceLost`.
    """

    rank: int
    process: int
    by: str
    reason: str
    watermark: int
    user: str = ""


class DeviceJoined(Control, frozen=True, kw_only=True, tag="device_joined@1"):
    """Devices of one `device_class` take the same time for the same work (GPU model, emulated profile); "" = unknown.

    `watermark` as in `DeviceLost`: who joins later than the run began is on standby until a plan has work for it.
    """

    device: str
    rank: int
    node: str
    pid: int
    device_class: str = ""
    watermark: int | None = None


class Suspected(Control, frozen=True, kw_only=True, tag="suspected@1"):
    """A rank hangs and is about to be killed, so that `DeviceLost` follows when its process has ended, or will not end; or it
    is frozen, and the others go on without it."""

    rank: int
    how: Literal["exit", "hung", "frozen"]
    detail: str


class CheckpointSaved(Control, frozen=True, kw_only=True, tag="checkpoint_saved@1"):
    """Every layer with its optimiser state is on disk as it was after `iterations` iterations.

    `seconds`: the longest that a rank's thread wrote, beside training; `paused_us`: the longest that training stood still.
    """

    iterations: int
    bytes: int
    seconds: float
    paused_us: int


class Probed(Control, frozen=True, kw_only=True, tag="probed@1"):
    """What direct measurement of suspects found, before iteration `at_iteration`.

    `slowdowns`: rank -> its matrix product's time over the one when the run began; `links`: (sender, receiver, bytes per us);
    `cost_us`: the longest that a rank was kept from training for it.
    """

    at_iteration: int
    ranks: tuple[int, ...]
    slowdowns: dict[str, float]
    links: tuple[tuple[int, int, float], ...]
    cost_us: int


class StandbyMeasured(Control, frozen=True, kw_only=True, tag="standby_measured@1"):
    """A rank that executes nothing has measured itself: its matrix product's time, and that over the one when the run began
    (None where there is none). `iteration`: the one the others were in when it was asked; `watermark` as in `DeviceLost`."""

    rank: int
    iteration: int
    product_us: int
    slowdown: float | None
    watermark: int


class DeviceLost(Control, frozen=True, kw_only=True, tag="device_lost@1"):
    """`how` is exit (the process ended), hung (no progress, heartbeats go on) or frozen (no heartbeats, process exists).

    `watermark`: iterations that had been judged by then, so that a replay puts the loss where the live run saw it; `iteration`:
    the one that the rank was in; `victims`: who waited for it. `cut_off`: its process is still there: frozen, or waiting in the
    kernel (for a driver or a disk) where SIGKILL does not end it. `DeviceJoined` (it goes on) or `ProcessEnded` follows.
    """

    device: str
    rank: int
    how: Literal["exit", "hung", "frozen"]
    detail: str
    detected_us: int
    watermark: int | None = None
    iteration: int | None = None
    victims: tuple[int, ...] = ()
    cut_off: bool = False


class ProcessEnded(Control, frozen=True, kw_only=True, tag="process_ended@1"):
    """The process of a rank that was lost while it was still there has ended at last; `watermark` as in `DeviceLost`."""

    rank: int
    detail: str
    watermark: int


class Regrouped(Control, frozen=True, kw_only=True, tag="regrouped@1"):
    """All survivors hold working groups again; `seconds` counts from the detection (or the boundary) to the last of them.

    `kept`: the share of `iteration`'s gradients (layer by micro-batch) that the survivors hold and nobody computes again; None
    = no attempt at it had begun.
    """

    plan_version: int = msgspec.field(name="epoch")
    iteration: int
    seconds: float
    migrate_seconds: float
    moved_bytes: int
    kept: float | None = None


class FaultInjected(Control, frozen=True, kw_only=True, tag="fault_injected@1"):
    """The truth that verdicts are scored against; `until_iteration` None = to the end; `watermark` as in `DeviceLost`.

    `announced_us`: the rank's wall clock when it was about to carry it out. A slow one is full after `ramp` iterations, there
    in the first `on` of `every`, and slows what computes or waits for memory (`of`). A slow link delays messages from `rank`
    to `peer` by `delay_ms`. One that strikes does it at a `point`, before a chunk of a `phase`, for `seconds` (None: for ever).
    """

    kind: FaultKind
    rank: int
    at_iteration: int
    until_iteration: int | None = None
    factor: float | None = None
    phase: str | None = None
    announced_us: int | None = None
    watermark: int | None = None
    point: str | None = None
    ramp: int | None = None
    every: int | None = None
    on: int | None = None
    of: SlowPart = "compute"
    peer: int | None = None
    delay_ms: float | None = None
    seconds: float | None = None


class ModeChanged(Control, frozen=True, kw_only=True, tag="mode_changed@1"):
    """`watermark` as in `DeviceLost`; None = by a version that did not ask the Scheduler anew after it.

    Here and in the other answers to a command `by` is the name that somebody gave, and `user` the operating system's.
    """

    mode: Mode
    by: str
    reason: str = ""
    watermark: int | None = None
    user: str = ""


class Note(Control, frozen=True, kw_only=True, tag="note@1"):
    """`proposal`: the one that it is about, "" = none."""

    text: str
    by: str
    proposal: str = ""
    user: str = ""


class CommandRefused(Control, frozen=True, kw_only=True, tag="command_refused@1"):
    command: str
    by: str
    reason: str
    user: str = ""


# --- control: measure, predict, detect -------------------------------------------------------------------------------


class AdaptationStarted(Control, frozen=True, kw_only=True, tag="adaptation_started@1"):
    """What the deciding part of the controller was given, as plain data: with this and the log its decisions can be replayed.

    `site` is analytics.loop.site.Site, `options` its AdaptationOptions.
    """

    site: dict[str, Any]
    options: dict[str, Any]


class PredictorFitted(Control, frozen=True, kw_only=True, tag="predictor_fitted@1"):
    """`model` is analytics.core.cost.CostModel as plain data; errors are mean absolute relative, in percent, on data not
    fitted."""

    predictor: int
    watermark: int
    model: dict[str, Any]
    n_chunks: int
    error_percent: dict[str, float]
    trigger: str


class Party(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who is meant: a device (`rank`), a link (`link`), a stage (`stage`) or a whole replica (`replica`)."""

    kind: Literal["device", "link", "stage", "replica"]
    rank: int | None = None
    link: tuple[int, int] | None = None
    stage: int | None = None
    replica: int | None = None


class Verdict(Control, frozen=True, kw_only=True, tag="verdict@1"):
    """What is wrong, who did it, who only suffers. `speed` is per kind (healthy 1.0); `config` hashes the thresholds."""

    verdict: int
    cause: Cause
    culprits: tuple[Party, ...]
    victims: tuple[Party, ...] = ()
    speed: dict[str, float] = {}
    since_iteration: int
    until_iteration: int | None = None
    at_iteration: int
    confidence: float
    sentence: str
    evidence: dict[str, Any]
    config: str = ""


class VerdictClosed(Control, frozen=True, kw_only=True, tag="verdict_closed@1"):
    """The condition ended: the device is back at its healthy speed."""

    verdict: int
    until_iteration: int
    at_iteration: int
    reason: str


MOST_SLOWDOWN = 2.0
"""Who would only have seen a device at less than half of its speed has not looked."""


class DetectionLimit(Control, frozen=True, kw_only=True, tag="detection_limit@1"):
    """What the Detector sees from `at_iteration` on, when that changed: a lasting slowdown of a device of `smallest_slowdown`
    times its healthy time is named, and what `why` says of the whole job; None = it cannot be judged, and `why`."""

    at_iteration: int
    smallest_slowdown: float | None
    why: str = ""


class VerdictScored(Control, frozen=True, kw_only=True, tag="verdict_scored@1"):
    """The verdict against injected truth, or against later evidence (`by`). `truth` names the matching fault or what was seen
    later, None for a false verdict."""

    verdict: int
    correct: bool
    truth: str | None
    delay_iterations: int | None
    onset_error_iterations: int | None
    speed_error: float | None
    by: Literal["injected", "later"] = "injected"


class Diagnosed(Control, frozen=True, kw_only=True, tag="diagnosed@1"):
    """What `unskew diagnose` found in the run's log: on the stream analysis/diagnose, when it differs from the last one.

    `status`: the run's in the log that was read, "unfinished" before its end ("" in logs of versions that did not say): it is
    about the whole run when the run ended so.

    `verdicts` are `Verdict`s as plain data with numbers of their own, not those of the live run. `outcome`: wrong, well or
    cannot_be_judged ("" in logs of versions that did not judge that); well = a lasting slowdown of `smallest_slowdown`
    times the healthy time would have been named; `why`: the sentence to it.
    """

    observability: str
    verdicts: tuple[dict[str, Any], ...]
    time_lost_s: dict[str, float]
    abstained: tuple[str, ...]
    outcome: str = ""
    smallest_slowdown: float | None = None
    why: str = ""
    status: str = ""


# --- control: plan, approve, apply, score ----------------------------------------------------------------------------


class PlanProposed(Control, frozen=True, kw_only=True, tag="plan_proposed@1"):
    """A change of plan with the numbers that speak for it. `plan` is analytics.core.plan.Plan as plain data.

    `optional` False = minimal recovery after a death. `predicted_us`, `baseline_us`: mean iteration time under the new plan and
    without it, same speeds and batches; `considered` lists the other candidates with their scores; `evidence`:
    estimated speeds, number of the predictor, 95 % interval of the gain, hash of the Scheduler's options.
    """

    proposal: str
    plan_version: int = msgspec.field(name="epoch")
    digest: str
    optional: bool
    reason: str
    verdict: int | None
    plan: dict[str, Any]
    predicted_us: int | None
    baseline_us: int | None
    gain_percent: float | None
    cost_us: int
    payback_iterations: int | None
    at_iteration: int
    considered: tuple[dict[str, Any], ...] = ()
    change: str = ""
    evidence: dict[str, Any] = {}


class PlanApproved(Control, frozen=True, kw_only=True, tag="plan_approved@1"):
    proposal: str
    by: str
    reason: str
    user: str = ""


class PlanRejected(Control, frozen=True, kw_only=True, tag="plan_rejected@1"):
    proposal: str
    by: str
    reason: str
    user: str = ""


class PlanExpired(Control, frozen=True, kw_only=True, tag="plan_expired@1"):
    proposal: str
    reason: str


class PlanKept(Control, frozen=True, kw_only=True, tag="plan_kept@1"):
    """The Scheduler was asked and proposes nothing, for this reason."""

    plan_version: int = msgspec.field(name="epoch")
    at_iteration: int
    reason: str
    verdict: int | None = None


class PlanIssued(Control, frozen=True, kw_only=True, tag="plan_issued@1"):
    """`plan` is about to be sent to the ranks; it is in force from `PlanApplied` on. `watermark` as in `DeviceLost`.

    `optional`: a change that somebody chose, measured against the plan before it.
    """

    plan_version: int = msgspec.field(name="epoch")
    proposal: str
    optional: bool
    plan: dict[str, Any]
    watermark: int


class PlanApplied(Control, frozen=True, kw_only=True, tag="plan_applied@1"):
    """`plan` is in force from iteration `iteration` on (the initial plan has proposal ""); `watermark` as in `DeviceLost`."""

    plan_version: int = msgspec.field(name="epoch")
    digest: str
    proposal: str
    iteration: int
    reason: str
    plan: dict[str, Any]
    watermark: int | None = None


class PlanFailed(Control, frozen=True, kw_only=True, tag="plan_failed@1"):
    plan_version: int = msgspec.field(name="epoch")
    proposal: str
    reason: str


class PlanScored(Control, frozen=True, kw_only=True, tag="plan_scored@1"):
    """The effect of a change: predicted(old plan, estimated speeds, these batches) minus measured, per iteration.

    `interval_s` is the 95 % interval of the mean effect; None with `void` set when the fault ended or another plan came first.
    """

    plan_version: int = msgspec.field(name="epoch")
    proposal: str
    from_iteration: int
    to_iteration: int
    n: int
    predicted_s: float | None = None
    baseline_s: float | None = None
    measured_s: float | None = None
    effect_s: float | None = None
    interval_s: tuple[float, float] | None = None
    void: str | None = None


# --- control: alerts -------------------------------------------------------------------------------------------------


class AlertOpened(Control, frozen=True, kw_only=True, tag="alert_opened@1"):
    """The condition of rule `rule` holds for `subject` (a rank, a verdict, ...) of the run; delivered once, under name
    `alert`."""

    alert: str
    rule: str
    subject: str
    text: str


class AlertClosed(Control, frozen=True, kw_only=True, tag="alert_closed@1"):
    alert: str
    reason: str


class AlertDelivered(Control, frozen=True, kw_only=True, tag="alert_delivered@1"):
    """How the delivery of an alert's opening or closing went; `tries` 0 = nobody knows, because the process ended meanwhile."""

    alert: str
    phase: Literal["opened", "closed"]
    target: str
    ok: bool
    tries: int
    detail: str = ""


TELEMETRY: tuple[type[Telemetry], ...] = (
    Span, MicroBatchPacked, GradientsKept, QuorumFormed, ReplicaStep, IterationCommitted, Heartbeat, RankAttached, RankDetached,
    LoaderDivided, SamplesDrawn, IterationJudged, IterationTimed, OperationsRecorded, SourceRecorded, CollectiveRecorded,
    GroupRecorded, GpuState, HostClock, Dropped,
)  # fmt: skip
CONTROL: tuple[type[Control], ...] = (
    RunStarted, RunFinished, RankAdded, DeviceJoined, Suspected, Probed, StandbyMeasured, DeviceLost, ProcessEnded,
    Regrouped, FaultInjected,
    CheckpointSaved, ModeChanged, Note, CommandRefused, AdaptationStarted, PredictorFitted, Verdict, VerdictClosed,
    VerdictScored, DetectionLimit, Diagnosed, PlanProposed, PlanApproved, PlanRejected, PlanExpired, PlanKept, PlanIssued,
    PlanApplied, PlanFailed, PlanScored, AlertOpened, AlertClosed, AlertDelivered,
)  # fmt: skip


def tag_of(event: type[Event]) -> str:
    """The tag of an event type, such as ``span@1``."""
    return str(event.__struct_config__.tag)
