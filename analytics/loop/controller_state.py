"""What a controller decides on and what it can decide: the state, which is what a run's events add up to, and the decisions."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.analytics.health.probing import Probe
from unskew.analytics.health.rejoining import Rejoining
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.approval_queue import ApprovalQueue
from unskew.analytics.loop.plans import Plans
from unskew.collector.events import (
    Control,
    DeviceJoined,
    DeviceLost,
    IterationJudged,
    Mode,
    ModeChanged,
    RankAdded,
)


class Log(msgspec.Struct, frozen=True):
    """Append these events, as one batch, before what is decided after them is done."""

    events: tuple[Control, ...]
    actor: str = "controller"


class Issue(msgspec.Struct, frozen=True, kw_only=True):
    """Send `plan` to the ranks. `abort`: at once, else at the next boundary; `leaving`: ranks that hand over and leave;
    `probe`: what they measure when it begins."""

    plan: Plan
    proposal: str
    reason: str
    abort: bool
    leaving: tuple[int, ...] = ()
    probe: Probe | None = None


class MeasureIdle(msgspec.Struct, frozen=True):
    """Let ranks that execute nothing measure themselves while the others are in `iteration`."""

    ranks: tuple[int, ...]
    iteration: int


class StartRank(msgspec.Struct, frozen=True):
    """Start the process that was `added`; it is on standby beside `plan`, which has no role for it."""

    added: RankAdded
    plan: Plan


class StopRun(msgspec.Struct, frozen=True):
    """The run cannot go on; `no_plan`: with more ranks it could, from a checkpoint."""

    reason: str
    no_plan: bool = False


Decision = IterationJudged | Log | Issue | MeasureIdle | StartRank | StopRun


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """`adaptation` and `committed` (iterations judged so far) follow from the iterations; the rest is what the run's control
    events add up to."""

    adaptation: Adaptation
    queue: ApprovalQueue
    plans: Plans
    rejoining: Rejoining = Rejoining()
    alive: frozenset[int] = frozenset()
    committed: int = 0

    @staticmethod
    def begin(adaptation: Adaptation, mode: Mode = "auto") -> ControllerState:
        """Before anything has happened."""
        site = adaptation.site
        queue = ApprovalQueue(iterations=site.iterations, mode=mode)
        plans = Plans(first=site.origin)
        return ControllerState(adaptation=adaptation, queue=queue, plans=plans, committed=site.first_iteration)

    def take(self, event: Control) -> ControllerState:
        """With one more event of the run in the log."""
        alive, adaptation = self.alive, self.adaptation
        if isinstance(event, RankAdded):
            adaptation = adaptation.added(event.rank, event.watermark)
        elif isinstance(event, DeviceJoined):
            alive |= {event.rank}
            if event.rank in self.rejoining.cut_off:  # it goes on
                adaptation = adaptation.added(event.rank, event.watermark or 0)
            adaptation = adaptation.joined(event)
        elif isinstance(event, DeviceLost):
            alive -= {event.rank}
        elif isinstance(event, ModeChanged) and event.watermark is not None and event.mode not in ("observe", self.queue.mode):
            adaptation = adaptation.ask_anew(event.watermark)
        return msgspec.structs.replace(
            self,
            adaptation=adaptation,
            queue=self.queue.take(event),
            plans=self.plans.take(event),
            rejoining=self.rejoining.take(event),
            alive=alive,
        )


Outcome = tuple[ControllerState, list[Decision]]
