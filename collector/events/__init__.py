"""The vocabulary of the event log: every event type, frozen, with its schema version in its tag.

A tag is ``name@version`` (``span@1``). A line of a spool file is one JSON object: the envelope's fields (`seq`, `at_us` and,
for control events, `stream`, `version`, `actor`) followed by the event's own. Run and writer are in the file's path, not in
every line. Fields at their default are left out; a reader takes an absent field as its default.

Two classes (docs/reference/events.md):

* telemetry: high rate, key (run, writer, seq), may be dropped under pressure, and then a `Dropped` has their number;
* control: low rate, written and fsynced at once to a stream with versions, never dropped.

Units are in the names; durations and times are microseconds. `None` means not measured, `0.0` a measured zero.
Nothing here imports anything else of the project; a type's module is nobody's business but ours.
"""

from __future__ import annotations

from unskew.collector.events.alerts import AlertClosed, AlertDelivered, AlertOpened
from unskew.collector.events.base import (
    CHUNK_KINDS,
    CHUNK_NAMES,
    COLLECTIVE_KINDS,
    DEVICE_NAMES,
    OF_DEVICES,
    PAUSES,
    Cause,
    ChunkKind,
    CollectiveKind,
    Control,
    DetectorMethod,
    DeviceKind,
    Event,
    FaultKind,
    Mode,
    SlowPart,
    SpanKind,
    Telemetry,
    tag_of,
)
from unskew.collector.events.faults import Fault, FaultInjected
from unskew.collector.events.findings import (
    MOST_SLOWDOWN,
    AdaptationStarted,
    DetectionLimit,
    Diagnosed,
    Party,
    PredictorFitted,
    Verdict,
    VerdictClosed,
    VerdictScored,
)
from unskew.collector.events.imported import (
    CollectiveRecorded,
    GroupRecorded,
    IterationTimed,
    OperationsRecorded,
    SourceRecorded,
)
from unskew.collector.events.plans import (
    PlanApplied,
    PlanApproved,
    PlanExpired,
    PlanFailed,
    PlanIssued,
    PlanKept,
    PlanProposed,
    PlanRejected,
    PlanScored,
)
from unskew.collector.events.run import (
    CheckpointSaved,
    CommandRefused,
    DeviceJoined,
    DeviceLost,
    ModeChanged,
    Note,
    Probed,
    ProcessEnded,
    RankAdded,
    Regrouped,
    RunFinished,
    RunStarted,
    StandbyMeasured,
    Suspected,
)
from unskew.collector.events.watched import HostClock, LoaderDivided, PipelinePlace, RankAttached, RankDetached, SamplesDrawn
from unskew.collector.events.work import (
    Dropped,
    GpuState,
    GradientsKept,
    Heartbeat,
    IterationCommitted,
    IterationJudged,
    MicroBatchPacked,
    QuorumFormed,
    RankRatio,
    ReplicaStep,
    ReplicaStepState,
    Span,
)

__all__ = [
    "CHUNK_KINDS", "CHUNK_NAMES", "COLLECTIVE_KINDS", "CONTROL", "DEVICE_NAMES", "MOST_SLOWDOWN", "OF_DEVICES", "PAUSES",
    "TELEMETRY",
    "AdaptationStarted", "AlertClosed", "AlertDelivered", "AlertOpened", "Cause", "CheckpointSaved", "ChunkKind",
    "CollectiveKind", "CollectiveRecorded", "CommandRefused", "Control", "DetectionLimit", "DetectorMethod", "DeviceJoined",
    "DeviceKind", "DeviceLost", "Diagnosed", "Dropped", "Event", "Fault", "FaultInjected", "FaultKind", "GpuState",
    "GradientsKept", "GroupRecorded", "Heartbeat", "HostClock", "IterationCommitted", "IterationJudged", "IterationTimed",
    "LoaderDivided", "MicroBatchPacked", "Mode", "ModeChanged", "Note", "OperationsRecorded", "Party", "PipelinePlace",
    "PlanApplied", "PlanApproved", "PlanExpired", "PlanFailed", "PlanIssued", "PlanKept", "PlanProposed", "PlanRejected",
    "PlanScored", "PredictorFitted", "Probed", "ProcessEnded", "QuorumFormed", "RankAdded", "RankAttached", "RankDetached",
    "RankRatio", "Regrouped", "ReplicaStep", "ReplicaStepState", "RunFinished", "RunStarted", "SamplesDrawn", "SlowPart",
    "SourceRecorded", "Span", "SpanKind", "StandbyMeasured", "Suspected", "Telemetry", "Verdict", "VerdictClosed",
    "VerdictScored", "tag_of",
]  # fmt: skip

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
