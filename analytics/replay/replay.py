"""Replaying a run's decisions from its log alone, up to any iteration, and comparing them with what the live run recorded.

1. bring telemetry into whole iterations, by the same intake (recorded_run.py);
2. give them to the controller's rules, or to those of a watched training, with everything else that the live ones were given,
   where it was given (rehearsal.py, watched.py);
3. compare each judgement, predictor, verdict, score and proposal with the recorded one (differences.py).

What people and modes decided (approvals, expiries) is taken from the log; of a watched training also what was proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import msgspec

from unskew.analytics.core.code_hash import code_hash
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.run_state import LoggedControl, ProposalState, RunState, fold
from unskew.analytics.replay.causes import ReplayError, moment_of
from unskew.analytics.replay.differences import AS_LOGGED, IDENTITY, Difference, differences
from unskew.analytics.replay.recorded_run import RecordedRun
from unskew.analytics.replay.watched import rehearsal_of
from unskew.collector.events import Event, IterationJudged, PredictorFitted, RunFinished, Verdict


class ReplayedProposal(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal as it stood; `status` is open or approved."""

    proposal: str
    status: str
    optional: bool
    change: str
    gain_percent: float | None
    reason: str


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The state before the iteration after `until` was judged: `plan` in force, estimated `speeds` (rank -> kind,
    where not healthy).

    `same_code`: the run was decided by this very version of analytics, so that any difference is an error.
    """

    run: str
    until: int
    plan: Plan
    alive: tuple[int, ...]
    speeds: dict[int, dict[str, float]]
    verdicts: tuple[Verdict, ...]
    predictor: PredictorFitted | None
    proposals: tuple[ReplayedProposal, ...]
    compared: int
    differences: tuple[Difference, ...]
    same_code: bool


def replay(recorded: RecordedRun, until: int | None = None) -> Replay:
    """Decide again up to iteration `until` (default: all of it). Raises `ReplayError`."""
    rehearsal = rehearsal_of(recorded)
    compared = [kind for kind in IDENTITY if not (recorded.attached and kind in AS_LOGGED)]
    last = rehearsal.last if until is None else until
    if until is not None and not rehearsal.first <= until <= rehearsal.last:
        raise ReplayError(
            f"run {recorded.run} has the iterations {rehearsal.first} to {rehearsal.last}, {until} is not among them"
        )
    rehearsal.run(last)
    past = _until(recorded, last, whole=last == rehearsal.last)
    decided = [noted.event for noted in past if type(noted.event) in compared]
    judged = [event for iteration, event in recorded.judged.items() if iteration <= last]
    replayed = reduce(fold, rehearsal.made, RunState())
    known = reduce(fold, (noted.event for noted in past), RunState())
    same_code = recorded.started is not None and recorded.started.code == code_hash()
    return Replay(
        run=recorded.run,
        until=last,
        plan=rehearsal.plan,
        alive=rehearsal.alive,
        speeds=rehearsal.monitor.speeds,
        verdicts=tuple(state.verdict for state in replayed.open_verdicts),
        predictor=replayed.predictors[-1] if replayed.predictors else None,
        proposals=tuple(_proposal(state) for state in known.proposals.values() if state.status in {"open", "approved"}),
        compared=len(decided) + len(judged),
        differences=differences([*judged, *decided], _as_far_as_recorded(recorded, rehearsal.made), same_code=same_code),
        same_code=same_code,
    )


def _as_far_as_recorded(recorded: RecordedRun, made: Sequence[Event]) -> list[Event]:
    """What is compared, without the newest judgements whose line is missing: a run that goes on or was killed had not handed
    them over yet."""
    last = max(recorded.judged, default=-1)
    over = any(isinstance(noted.event, RunFinished) for noted in recorded.control)
    return [
        event
        for event in made
        if type(event) in IDENTITY and (over or not isinstance(event, IterationJudged) or event.iteration <= last)
    ]


def _until(recorded: RecordedRun, until: int, *, whole: bool) -> list[LoggedControl]:
    """The control events up to the moment before the iteration after `until` was judged. What was appended at once stays
    together; what names no iteration (what people and modes decide, looking back) is placed by the clock of the controller,
    which wrote both."""
    if whole:
        return list(recorded.control)
    next_us = min((at_us for iteration, at_us in recorded.judged_us.items() if iteration > until), default=None)
    latest: dict[int, int] = {}
    for noted in recorded.control:
        latest[noted.at_us] = max(latest.get(noted.at_us, -1), moment_of(noted.event))
    past: list[LoggedControl] = []
    for noted in recorded.control:
        if latest[noted.at_us] > until:
            break
        if latest[noted.at_us] >= 0 or next_us is None or noted.at_us < next_us:
            past.append(noted)
    return past


def _proposal(state: ProposalState) -> ReplayedProposal:
    proposed = state.proposed
    return ReplayedProposal(
        proposal=proposed.proposal,
        status=state.status,
        optional=proposed.optional,
        change=proposed.change,
        gain_percent=proposed.gain_percent,
        reason=proposed.reason,
    )
