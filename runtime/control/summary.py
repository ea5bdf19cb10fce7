"""What a run came to, gathered from its log: `unskew run --json`."""

from __future__ import annotations

from typing import Any

import msgspec

from unskew.collector.events import (
    Dropped,
    FaultInjected,
    IterationCommitted,
    Party,
    PlanApplied,
    PlanScored,
    Verdict,
    VerdictClosed,
)
from unskew.collector.files.tail import Entry


class FaultSummary(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    rank: int
    at_iteration: int


class VerdictSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The last revision of a verdict."""

    cause: str
    culprits: tuple[Party, ...]
    victims: tuple[Party, ...]
    speed: dict[str, float]
    since_iteration: int
    until_iteration: int | None
    at_iteration: int
    confidence: float
    evidence: dict[str, Any]
    sentence: str


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that came into force; means per iteration over the `n` that were scored, None where there is no score."""

    plan_version: int = msgspec.field(name="epoch")
    at_iteration: int
    reason: str
    predicted_s: float | None = None
    baseline_s: float | None = None
    measured_s: float | None = None
    n: int = 0
    interval_s: tuple[float, float] | None = None


class EventCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`written` = seen in the spools, `stored` = rows a reader of the store sees; `log_complete` for every iteration."""

    written: int
    stored: int
    dropped: int
    log_complete: bool


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    max_abs_loss_difference: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`losses[i]` (nats per target token) and `iteration_s[i]` of committed iteration i."""

    run_id: str
    device: str
    iterations: int
    losses: tuple[float, ...]
    iteration_s: tuple[float, ...]
    faults: tuple[FaultSummary, ...]
    verdicts: tuple[VerdictSummary, ...]
    plans: tuple[PlanSummary, ...]
    events: EventCounts
    verify: Verification | None = None


class _Iteration(msgspec.Struct, frozen=True, gc=False):
    """What is kept of an iteration: that of the attempt that counted, the latest (epoch, attempt) that was committed."""

    plan_version: int = msgspec.field(name="epoch")
    attempt: int
    loss: float
    wall_us: int
    log_complete: bool


def _fold(kept: _Iteration | None, event: IterationCommitted) -> _Iteration:
    """One more rank's word on an iteration."""
    if kept is None or (kept.plan_version, kept.attempt) < (event.plan_version, event.attempt):
        return _Iteration(event.plan_version, event.attempt, event.loss, event.wall_us, event.log_complete)
    if (kept.plan_version, kept.attempt) > (event.plan_version, event.attempt):
        return kept
    return msgspec.structs.replace(
        kept, wall_us=max(kept.wall_us, event.wall_us), log_complete=kept.log_complete and event.log_complete
    )


class Gathering:
    """Folds log entries, in any order across writers, into a `Summary`."""

    def __init__(self) -> None:
        self._commits: dict[int, _Iteration] = {}
        self._faults: list[FaultSummary] = []
        self._verdicts: dict[int, Verdict] = {}
        self._closed: dict[int, int] = {}
        self._plans: dict[int, PlanApplied] = {}
        self._scores: dict[int, PlanScored] = {}
        self._written = self._dropped = 0

    def take(self, entry: Entry) -> None:
        """One entry."""
        event = entry.event
        self._written += 1
        if isinstance(event, IterationCommitted):
            self._commits[event.iteration] = _fold(self._commits.get(event.iteration), event)
        elif isinstance(event, FaultInjected):
            self._faults.append(FaultSummary(kind=event.kind, rank=event.rank, at_iteration=event.at_iteration))
        elif isinstance(event, Verdict):
            self._verdicts[event.verdict] = event
        elif isinstance(event, VerdictClosed):
            self._closed[event.verdict] = event.until_iteration
        elif isinstance(event, PlanApplied):
            self._plans[event.plan_version] = event
        elif isinstance(event, PlanScored):
            self._scores[event.plan_version] = event
        elif isinstance(event, Dropped):
            self._dropped += event.count

    def summary(self, run: str, device: str, stored: int, verify: Verification | None) -> Summary:
        """What was taken so far; `stored` as counted in the store."""
        commits = [self._commits[iteration] for iteration in sorted(self._commits)]
        return Summary(
            run_id=run,
            device=device,
            iterations=len(commits),
            losses=tuple(commit.loss for commit in commits),
            iteration_s=tuple(commit.wall_us / 1e6 for commit in commits),
            faults=tuple(self._faults),
            verdicts=tuple(self._verdict(number) for number in sorted(self._verdicts)),
            plans=tuple(self._plan(plan_version) for plan_version in sorted(self._plans)),
            events=EventCounts(
                written=self._written,
                stored=stored,
                dropped=self._dropped,
                log_complete=all(commit.log_complete for commit in commits),
            ),
            verify=verify,
        )

    @property
    def losses(self) -> dict[int, float]:
        return {iteration: commit.loss for iteration, commit in self._commits.items()}

    def _verdict(self, number: int) -> VerdictSummary:
        verdict = self._verdicts[number]
        return VerdictSummary(
            cause=verdict.cause,
            culprits=verdict.culprits,
            victims=verdict.victims,
            speed=verdict.speed,
            since_iteration=verdict.since_iteration,
            until_iteration=self._closed.get(number, verdict.until_iteration),
            at_iteration=verdict.at_iteration,
            confidence=verdict.confidence,
            evidence=verdict.evidence,
            sentence=verdict.sentence,
        )

    def _plan(self, plan_version: int) -> PlanSummary:
        applied, score = self._plans[plan_version], self._scores.get(plan_version)
        if score is None:
            return PlanSummary(plan_version=plan_version, at_iteration=applied.iteration, reason=applied.reason)
        return PlanSummary(
            plan_version=plan_version,
            at_iteration=applied.iteration,
            reason=applied.reason,
            predicted_s=score.predicted_s,
            baseline_s=score.baseline_s,
            measured_s=score.measured_s,
            n=score.n,
            interval_s=score.interval_s,
        )
