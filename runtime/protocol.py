"""What controller, agent, zygote and ranks say to each other, over channels (channel.py).

controller <--TCP, secret--> agent <--socket pair--> zygote
                               ^--unix stream--> each rank's control thread; where ranks find each other
                               ^--shared memory-- each rank's heartbeat thread (heartbeat_page.py)
"""

from __future__ import annotations

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.analytics.health.liveness import RankLiveness
from unskew.analytics.health.probing import Probe
from unskew.analytics.scheduler.quorum import Quorum
from unskew.collector.events import Fault
from unskew.runtime.options import RunOptions


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank begins that is started beside the run: on standby under `plan`, which has no role for it, when so many
    iterations were `committed`."""

    plan: Plan
    committed: int


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank needs to take its place in the run; `device_id` names its device for life, `device` is its kind,
    `device_class` what it has in common with devices that take the same time for the same work. `joins`: None when the run
    begins."""

    rank: int
    device_id: str
    device_class: str
    run: str
    writer: str
    store: str
    options: RunOptions
    device: str
    gpu: int | None
    agent_folder: str
    joins: Joining | None = None


def writer_of(rank: int, process: int = 1) -> str:
    """The name under which a rank's `process`-th process writes to the log."""
    return f"rank-{rank:04d}.{process}"


class Hello(Message, frozen=True, kw_only=True):
    """Agent to controller: `secret` proves that the controller started it, "" where the controller came to its socket;
    `at_us` is the node's wall clock."""

    secret: str
    node: str
    at_us: int = 0


class TakeOver(Message, frozen=True, kw_only=True):
    """From a new controller to an agent that has lost its own: answer with `Hello`, and say again what you last reported."""


class Prepare(Message, frozen=True, kw_only=True):
    """To agent and zygote: load the corpus, then say Ready.

    For the agent to compare clocks: `ahead_us` = its clock when it sent Hello minus the controller's when that came (the
    true difference is not less), `at_us` the controller's now.
    """

    run: str
    store: str
    options: RunOptions
    ahead_us: int = 0
    at_us: int = 0


class Ready(Message, frozen=True, kw_only=True):
    """From zygote and agent: `gpus` of this node and their models with the bytes of each, () when these are not known;
    `problem` "" unless the corpus cannot be used."""

    gpus: int
    gpu_models: tuple[tuple[str, int], ...] = ()
    problem: str = ""


class Start(Message, frozen=True, kw_only=True):
    """To agent and zygote: fork these ranks, save those of writers that were forked before."""

    rank_specs: tuple[RankSpec, ...]


class RankForked(Message, frozen=True, kw_only=True):
    rank: int
    pid: int


class RankExited(Message, frozen=True, kw_only=True):
    """A rank's process has ended; `at_ns` is the monotonic clock of its node when the zygote noticed."""

    rank: int
    pid: int
    detail: str
    at_ns: int


class PlanRecord(Message, frozen=True, kw_only=True):
    """A plan, and when it begins: `abort` = at once (a member is gone), else at the commit boundary that the vote finds.

    `probe`: what is measured at that boundary, before training goes on. `leaving`: ranks of the plan before that have no role
    in this one; they hand their layers over and go on standby.
    """

    plan: Plan
    abort: bool
    probe: Probe | None = None
    leaving: tuple[int, ...] = ()

    def names(self, rank: int) -> bool:
        """Whether the rank has a part in this change."""
        return rank in self.plan.role_of or rank in self.leaving


class MeasureStandby(Message, frozen=True, kw_only=True):
    """To ranks that execute nothing: measure yourselves, while the others train; `iteration` is the one they are in."""

    ranks: tuple[int, ...]
    iteration: int


class Judged(Message, frozen=True, kw_only=True):
    """To ranks on virtual time: so many iterations are judged, counted from the run's very first."""

    iterations: int


class StandbyProduct(Message, frozen=True, kw_only=True):
    """From a rank that executes nothing: the time of its matrix product by its device's clock, when asked in `iteration`."""

    rank: int
    iteration: int
    product_us: int


class PlanEntered(Message, frozen=True, kw_only=True):
    """From a rank: its groups of `plan_version` are connected and it holds the plan's layers; it goes on with `iteration`.

    `began_ns`, `at_ns`: the node's monotonic clock when it began to regroup, and now. `kept` as in `Regrouped`.
    """

    rank: int
    plan_version: int
    iteration: int
    began_ns: int
    at_ns: int
    migrate_s: float
    moved_bytes: int
    kept: float | None = None


class FaultAnnounced(Message, frozen=True, kw_only=True):
    """From a rank: it is about to carry out a fault, in this iteration; `at_us` by the wall clock."""

    fault: Fault
    iteration: int
    at_us: int


class CommunicationBroken(Message, frozen=True, kw_only=True):
    """From a rank: its communication of `plan_version` failed; it waits for a plan record that aborts."""

    rank: int
    plan_version: int
    detail: str


class RankFailed(Message, frozen=True, kw_only=True):
    """From a rank: an error ends it, and which; `fatal` = no other rank could go on either."""

    rank: int
    plan_version: int
    detail: str
    fatal: bool


class RankFinished(Message, frozen=True, kw_only=True):
    """From a rank: all iterations are committed, `committed` of them. `unwritten`: so many of its events the disk has not
    taken by now, `problem`: why."""

    rank: int
    committed: int
    unwritten: int
    problem: str = ""


class ZygoteExited(Message, frozen=True, kw_only=True):
    """From an agent that is about to end: its zygote has ended, and how; all ranks end with it."""

    detail: str


class NodeFinished(Message, frozen=True, kw_only=True):
    """From an agent, its last word: so many of its own events (heartbeats) the disk has not taken, and why."""

    unwritten: int
    problem: str = ""


class CheckpointPart(Message, frozen=True, kw_only=True):
    """From a rank: these layers, as they were after `iterations` iterations, are on disk; or `problem` says why not.

    `part`: what it has of each of them (first, end, of). `seconds` it took beside training, `paused_us` training stood still.
    """

    rank: int
    iterations: int
    layers: tuple[int, ...]
    bytes: int
    seconds: float
    paused_us: int
    problem: str = ""
    part: tuple[int, int, int] = (0, 1, 1)


class Publish(Message, frozen=True, kw_only=True):
    """From a rank to its agent: a value that other ranks wait for under the newest plan."""

    key: str
    value: bytes


class Await(Message, frozen=True, kw_only=True):
    """From a rank to its agent: answer with `Published` once all of `keys` are published."""

    keys: tuple[str, ...]


class Published(Message, frozen=True, kw_only=True):
    """The values of the keys that a rank waited for."""

    keys: tuple[str, ...]
    values: tuple[bytes, ...]


class QuorumProposal(Message, frozen=True, kw_only=True):
    """From the first rank of a replica: the step that it wants to run next (see `Standing`)."""

    rank: int
    replica: int
    plan_version: int
    iteration: int
    attempt: int
    current: bool
    ahead: bool


class QuorumFound(Message, frozen=True, kw_only=True):
    """To all ranks: who takes part in the next step."""

    quorum: Quorum


class Stop(Message, frozen=True, kw_only=True):
    """To agent and ranks: hand over your events and end."""


class Kill(Message, frozen=True, kw_only=True):
    """To agent and zygote: SIGKILL a rank that hangs or is frozen."""

    rank: int


class RankStatus(RankLiveness, frozen=True, kw_only=True):
    """What the agent knows of a rank; `at_s` is the agent's clock.

    `longest_work_s`: the longest recent stretch of work of its own after which it did move on.
    """

    iteration: int
    longest_work_s: float


class RankStatuses(Message, frozen=True, kw_only=True):
    """From agent to controller, ten times a second: all its ranks."""

    statuses: tuple[RankStatus, ...]


AnyMessage = (
    Hello | TakeOver | Prepare | Ready | Start | Stop | Kill | RankForked | RankExited | PlanRecord
    | PlanEntered | FaultAnnounced | CommunicationBroken | RankFailed | RankFinished | NodeFinished | RankStatuses
    | MeasureStandby | Judged | StandbyProduct | CheckpointPart | Publish | Await | Published | ZygoteExited
    | QuorumProposal | QuorumFound
)  # fmt: skip
AGENT_SOCKET, AGENT_LOCK = "agent", "lock"
"""Names in `RankSpec.agent_folder`: the agent's socket, and the lock that it holds while it lives."""
