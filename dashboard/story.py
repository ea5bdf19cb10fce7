"""The story of a run: its control events, in order, folded into what the page tells.

A pure projection. Telemetry has no part in it, so it stays small (tens of events) however long the run is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.collector.events import (
    CommandRefused,
    Control,
    DeviceJoined,
    DeviceLost,
    FaultInjected,
    Mode,
    ModeChanged,
    PlanApplied,
    PlanApproved,
    PlanExpired,
    PlanFailed,
    PlanProposed,
    PlanRejected,
    PlanScored,
    RunFinished,
    RunStarted,
    Verdict,
    VerdictClosed,
    VerdictScored,
)

T = TypeVar("T")
Decision = PlanApproved | PlanRejected | PlanExpired


class Logged(msgspec.Struct, frozen=True):
    """A control event with its envelope; `at_us` is wall time."""

    at_us: int
    actor: str
    event: Control


class Judged(msgspec.Struct, frozen=True):
    """A verdict and what became of it. `answer` is the epoch of the plan that was applied because of it; `rejoined`: it calls
    ranks dead that were lost and have all come back."""

    verdict: Verdict
    at_us: int
    closed: VerdictClosed | None = None
    scored: VerdictScored | None = None
    answer: int | None = None
    rejoined: bool = False

    @property
    def is_open(self) -> bool:
        return self.closed is None and self.verdict.until_iteration is None and not self.rejoined


class Change(msgspec.Struct, frozen=True):
    """A proposal and what became of it."""

    proposed: PlanProposed
    at_us: int
    decision: Decision | None = None
    decided_us: int | None = None
    applied: PlanApplied | None = None
    applied_us: int | None = None
    failed: PlanFailed | None = None
    scored: PlanScored | None = None
    refused: CommandRefused | None = None

    @property
    def state(self) -> str:
        """open, approved, rejected, expired, applied, failed or scored."""
        if self.failed is not None:
            return "failed"
        if self.scored is not None:
            return "scored"
        if self.applied is not None:
            return "applied"
        if self.decision is None:
            return "open"
        return {PlanApproved: "approved", PlanRejected: "rejected", PlanExpired: "expired"}[type(self.decision)]


class Story(msgspec.Struct, frozen=True):
    """Everything but telemetry, each list in the order of the log. `lost`: the losses of ranks that have not come back."""

    started: RunStarted | None = None
    finished: RunFinished | None = None
    mode: Mode = "observe"
    verdicts: tuple[Judged, ...] = ()
    changes: tuple[Change, ...] = ()
    plans: tuple[PlanApplied, ...] = ()
    lost: tuple[DeviceLost, ...] = ()
    faults: tuple[FaultInjected, ...] = ()
    log: tuple[Logged, ...] = ()

    @property
    def open_verdicts(self) -> tuple[Judged, ...]:
        return tuple(judged for judged in self.verdicts if judged.is_open)

    @property
    def open_changes(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.state == "open")

    @property
    def plan(self) -> PlanApplied | None:
        """The plan in force."""
        return self.plans[-1] if self.plans else None


def tell(log: Iterable[Logged]) -> Story:
    """Fold the control events of one run, in the order of the log."""
    entries = tuple(log)
    events = [entry.event for entry in entries]
    mode: Mode = "observe"
    for event in events:
        if isinstance(event, RunStarted | ModeChanged):
            mode = event.mode
    changes = tuple(_change(entry, entry.event, entries) for entry in entries if isinstance(entry.event, PlanProposed))
    lost = _still_lost(events)
    back = {loss.rank for loss in _all(events, DeviceLost)} - {loss.rank for loss in lost}
    return Story(
        started=_last(events, RunStarted),
        finished=_last(events, RunFinished),
        mode=mode,
        verdicts=tuple(
            _judged(entry.at_us, entry.event, events, changes, back) for entry in entries if isinstance(entry.event, Verdict)
        ),
        changes=changes,
        plans=_all(events, PlanApplied),
        lost=lost,
        faults=_all(events, FaultInjected),
        log=entries,
    )


def _all(events: Iterable[Control], kind: type[T]) -> tuple[T, ...]:
    return tuple(event for event in events if isinstance(event, kind))


def _last(events: Iterable[Control], kind: type[T]) -> T | None:
    return next(reversed(_all(events, kind)), None)


def _still_lost(events: Iterable[Control]) -> tuple[DeviceLost, ...]:
    """The last loss of each rank that neither joined again nor holds layers in a plan applied since."""
    lost: dict[int, DeviceLost] = {}
    for event in events:
        if isinstance(event, DeviceLost):
            lost.pop(event.rank, None)
            lost[event.rank] = event
        elif isinstance(event, DeviceJoined):
            lost.pop(event.rank, None)
        elif isinstance(event, PlanApplied) and lost:
            for role in Plan.from_data(event.plan).roles:
                lost.pop(role.rank, None)
    return tuple(lost.values())


def _judged(
    at_us: int, verdict: Verdict, events: Sequence[Control], changes: Sequence[Change], back: Collection[int]
) -> Judged:
    answers = [change for change in changes if change.proposed.verdict == verdict.verdict and change.applied is not None]
    return Judged(
        verdict=verdict,
        at_us=at_us,
        closed=_last((e for e in _all(events, VerdictClosed) if e.verdict == verdict.verdict), VerdictClosed),
        scored=_last((e for e in _all(events, VerdictScored) if e.verdict == verdict.verdict), VerdictScored),
        answer=answers[-1].proposed.plan_version if answers else None,
        rejoined=verdict.cause == "dead" and bool(verdict.culprits) and all(party.rank in back for party in verdict.culprits),
    )


def _change(entry: Logged, proposed: PlanProposed, entries: Sequence[Logged]) -> Change:
    change = Change(proposed=proposed, at_us=entry.at_us)
    for later in entries:
        event = later.event
        if isinstance(event, CommandRefused) and event.command == proposed.proposal:
            change = msgspec.structs.replace(change, refused=event)
        if getattr(event, "proposal", None) != proposed.proposal:
            continue
        if isinstance(event, Decision):
            change = msgspec.structs.replace(change, decision=event, decided_us=later.at_us)
        elif isinstance(event, PlanApplied):
            change = msgspec.structs.replace(change, applied=event, applied_us=later.at_us)
        elif isinstance(event, PlanFailed):
            change = msgspec.structs.replace(change, failed=event)
        elif isinstance(event, PlanScored):
            change = msgspec.structs.replace(change, scored=event)
    return change
