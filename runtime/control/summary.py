"""The result of a run, gathered from its log: `unskew run --json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from unskew.analytics.core.outcome import Outcome, outcome_of_run
from unskew.analytics.core.run_state import ProposalState, ProposalStatus, RunState, fold
from unskew.collector.events import IterationCommitted, Party, PlanApplied, PlanScored, RunFinished
from unskew.collector.files.tail import Entry
from unskew.collector.log_gap import log_gap
from unskew.runtime.options import ResumePoint


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


class ProposalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal and the last stage that it reached, "open" where it still waited; `limit`: what mode auto last said that keeps
    it from applying it, "" = nothing."""

    proposal: str
    at_iteration: int
    optional: bool
    change: str
    gain_percent: float | None
    status: ProposalStatus
    limit: str


class EventCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`written` = seen in the spools, `stored` = rows a reader of the store sees, `dropped` = lost by full buffers,
    `unwritten` = refused by the disk to the end;
    `log_complete`: every iteration is there, and was when it was voted on."""

    written: int
    stored: int
    dropped: int
    dropped_types: dict[str, int]
    unwritten: int
    log_complete: bool


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    max_abs_loss_difference: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`losses[i]` (nats per target token) of committed iteration i, before `resumed_at` those of the run that this one goes on
    with; `iteration_s` of the iterations that it trained itself; `outcome` at the run's end. `status` and `reason` are those of
    `RunFinished`; `iterations` are in the log, of the `committed` ones."""

    run_id: str
    status: Literal["done", "failed", "stopped", "incomplete"]
    reason: str
    device: str
    policy: str
    detector: str
    iterations: int
    committed: int
    losses: tuple[float, ...]
    iteration_s: tuple[float, ...]
    faults: tuple[FaultSummary, ...]
    verdicts: tuple[VerdictSummary, ...]
    plans: tuple[PlanSummary, ...]
    proposals: tuple[ProposalSummary, ...]
    events: EventCounts
    outcome: Outcome
    verify: Verification | None = None
    resumed_from: str | None = None
    resumed_at: int | None = None


class CommittedAttempt(msgspec.Struct, frozen=True, gc=False):
    """What is kept of an iteration: that of the attempt that counted, the latest (plan version, attempt) that was committed."""

    plan_version: int
    attempt: int
    loss: float
    wall_us: int
    log_complete: bool


def _kept(before: CommittedAttempt | None, event: IterationCommitted) -> CommittedAttempt:
    """One more rank's word on an iteration."""
    if before is None or (before.plan_version, before.attempt) < (event.plan_version, event.attempt):
        return CommittedAttempt(event.plan_version, event.attempt, event.loss, event.wall_us, event.log_complete)
    if (before.plan_version, before.attempt) > (event.plan_version, event.attempt):
        return before
    return msgspec.structs.replace(
        before, wall_us=max(before.wall_us, event.wall_us), log_complete=before.log_complete and event.log_complete
    )


class SummaryBuilder:
    """Folds log entries, in any order across writers, into a `Summary`."""

    def __init__(self) -> None:
        self._commits: dict[int, CommittedAttempt] = {}
        self.last_logged: dict[int, int] = {}
        """The last iteration of each rank."""
        self._state = RunState()
        self._written = 0

    def take(self, entry: Entry) -> None:
        """One entry."""
        event = entry.event
        self._written += 1
        if isinstance(event, IterationCommitted):
            self._commits[event.iteration] = _kept(self._commits.get(event.iteration), event)
            self.last_logged[event.rank] = max(event.iteration, self.last_logged.get(event.rank, -1))
        else:
            self._state = fold(self._state, event)

    def summary(
        self,
        run: str,
        device: str,
        stored: int,
        verify: Verification | None,
        end: RunFinished,
        *,
        resume: ResumePoint | None = None,
        earlier: Mapping[int, float] = {},
    ) -> Summary:
        """What was taken so far; `stored` as counted in the store, `earlier` losses from before the run was resumed."""
        commits = [self._commits[iteration] for iteration in sorted(self._commits)]
        state = self._state
        return Summary(
            run_id=run,
            status=end.status,
            reason=end.reason,
            device=device,
            policy=state.started.policy if state.started is not None else "",
            detector=state.started.detector if state.started is not None else "",
            iterations=len(commits),
            committed=end.committed or len(commits),
            losses=(*(earlier[iteration] for iteration in sorted(earlier)), *(commit.loss for commit in commits)),
            iteration_s=tuple(commit.wall_us / 1e6 for commit in commits),
            faults=tuple(msgspec.convert(fault, FaultSummary, from_attributes=True) for fault in state.faults),
            verdicts=tuple(
                msgspec.convert(state.verdicts[number].verdict, VerdictSummary, from_attributes=True)
                for number in sorted(state.verdicts)
            ),
            plans=tuple(_plan(applied.event, state.scores.get(applied.event.plan_version)) for applied in state.plans),
            proposals=tuple(_proposal(proposal) for proposal in state.proposals.values()),
            events=EventCounts(
                written=self._written,
                stored=stored,
                dropped=sum(state.dropped.values()),
                dropped_types=state.dropped,
                unwritten=end.unwritten,
                log_complete=all(commit.log_complete for commit in commits) and not state.dropped and self._is_whole(end),
            ),
            outcome=outcome_of_run(state if state.finished is not None else fold(state, end), controlled=True),
            verify=verify,
            resumed_from=resume.run if resume is not None else None,
            resumed_at=resume.iterations if resume is not None else None,
        )

    def _is_whole(self, end: RunFinished) -> bool:
        return self._state.finished is not None and not log_gap(self._state.started, end)

    @property
    def losses(self) -> dict[int, float]:
        return {iteration: commit.loss for iteration, commit in self._commits.items()}


def _proposal(state: ProposalState) -> ProposalSummary:
    proposed, limit = state.proposed, ""
    if state.refused is not None and state.refused.by == "auto":
        limit = state.refused.reason
    elif state.note is not None and state.note.by == "auto":
        limit = state.note.text
    return ProposalSummary(
        proposal=proposed.proposal,
        at_iteration=proposed.at_iteration,
        optional=proposed.optional,
        change=proposed.change,
        gain_percent=proposed.gain_percent,
        status=state.status,
        limit=limit,
    )


def _plan(applied: PlanApplied, score: PlanScored | None) -> PlanSummary:
    plan = PlanSummary(plan_version=applied.plan_version, at_iteration=applied.iteration, reason=applied.reason)
    if score is None:
        return plan
    return msgspec.structs.replace(
        plan,
        predicted_s=score.predicted_s,
        baseline_s=score.baseline_s,
        measured_s=score.measured_s,
        n=score.n,
        interval_s=score.interval_s,
    )
