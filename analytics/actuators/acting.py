"""The rules of acting on a training that is not ours: what is proposed, approved, handed on, and what it was worth.

The approval queue, its modes and the scores are those of our own runs. The ranks enter a plan by themselves, at a step boundary
that they agree on; the first step that one of them reports under it applies it. Pure, like loop/controller_rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from unskew.analytics.actuators.actuator import Actuator, Situation
from unskew.analytics.actuators.balance import LEAST_FITTED, Balance
from unskew.analytics.actuators.replace import Replace
from unskew.analytics.actuators.shares import Exclude, Shares
from unskew.analytics.actuators.times import JobTimes, StepLevel, by_lengths, level_of, like_seen, times_of, took_us
from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.division import FORESEEN, Division, foreseen
from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.loop.approval_queue import ApprovalQueue
from unskew.analytics.loop.scoring import PlanTrial, Row, score_plan
from unskew.analytics.loop.watched.attached_rules import AttachedState
from unskew.analytics.scheduler.propose import Proposal
from unskew.collector.command import Command
from unskew.collector.events import (
    CommandRefused,
    Control,
    Event,
    LoaderDivided,
    Mode,
    ModeChanged,
    Note,
    PlanApplied,
    PlanFailed,
    PlanIssued,
    PlanKept,
    SamplesDrawn,
    Verdict,
    VerdictClosed,
)

ACTUATORS: tuple[Actuator, ...] = (Balance(), Shares(), Exclude(), Replace())
"""The first that gains enough is proposed: what can be undone before what cannot."""
ASK_EVERY, LEAST_SEEN, RECENT = 8, 16, 24
SCORE_OVER, SETTLING = 20, 2
SCORE_BATCHES = 38
"""Global batches at least, where their lengths are balanced: by those of 20 steps the gain is twice as far off."""
MOST_DRAWN = 96
_NUMBER = re.compile(r"[\d.]+")
NO_END = 1_000_000_000
"""How many steps such a training will take is not known."""


class HandOver(msgspec.Struct, frozen=True):
    """Give `verdict` to whoever replaces devices, for `proposal`."""

    proposal: str
    verdict: Verdict


class Entering(msgspec.Struct, frozen=True):
    """Have the ranks enter this plan."""

    plan: Plan


Order = HandOver | Entering


class ActingState(msgspec.Struct, frozen=True, kw_only=True):
    """Never changed, only replaced. `plan` is in force, `issued` on its way to the ranks, `versions` have been given out.
    `offers`: rank -> what its loop lets be divided; `drawn`: (iteration, the global batches that are trained from it on),
    `coming`: those behind them, as far as they are known; `trial` is scored by `before`, the times when it was proposed;
    `slow`: the ranks that were slow then. `lately`: the last iterations under the plan in force, `cost`: by the last predictor;
    `level`: by which steps of balanced lengths are scored; `handed`: the slow ranks that were handed on."""

    queue: ApprovalQueue
    plan: Plan
    hand_to: str = ""
    versions: int = 0
    offers: dict[int, LoaderDivided] = {}
    drawn: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()
    coming: tuple[tuple[int, ...], ...] = ()
    times: JobTimes | None = None
    proposed_by: JobTimes | None = None
    issued: Plan | None = None
    proposal: str = ""
    trial: PlanTrial | None = None
    before: JobTimes | None = None
    slow: frozenset[int] = frozenset()
    kept: str = ""
    lately: tuple[IterationTelemetry, ...] = ()
    cost: CostModel | None = None
    level: StepLevel | None = None
    handed: frozenset[int] = frozenset()

    @property
    def division(self) -> Division | None:
        """In force; None while the loop has offered nothing."""
        if self.plan.division is not None or not self.offers:
            return self.plan.division
        return Division(samples=next(iter(self.offers.values())).samples)

    def take(self, *events: Control) -> ActingState:
        """With more events of the run in the log."""
        queue = self.queue
        for event in events:
            queue = queue.take(event)
        return msgspec.structs.replace(self, queue=queue)


Outcome = tuple[ActingState, list[Event], list[Order]]


def begin(plan: Plan, mode: Mode, hand_to: str = "") -> ActingState:
    """The first plan is known."""
    return ActingState(queue=ApprovalQueue(iterations=NO_END, mode=mode), plan=plan, hand_to=hand_to)


def heard(state: ActingState, event: Event) -> ActingState:
    """What a rank says of its loop."""
    match event:
        case LoaderDivided():
            return msgspec.structs.replace(state, offers={**state.offers, event.rank: event})
        case SamplesDrawn():
            drawn = (*state.drawn, (event.iteration, event.batches))[-MOST_DRAWN:]
            return msgspec.structs.replace(state, drawn=drawn, coming=event.coming or state.coming[len(event.batches) :])
    return state


def committed(state: ActingState, released: IterationTelemetry, seen: AttachedState, found: Sequence[Event]) -> Outcome:
    """The next iteration was judged, and that was `found`."""
    now, cost = released.committed.iteration, None if seen.monitor.fitted is None else seen.monitor.fitted.model
    state, events = _tried(state, released)
    state = msgspec.structs.replace(state, lately=seen.seen, cost=cost, handed=state.handed & slow_ranks(seen).keys())
    if state.trial is not None and state.slow != (slow := frozenset(slow_ranks(seen))):
        state, over = _trial_over(state, _changed(state.slow, slow), _since(found, now))
        events += over
    if state.issued is None and state.trial is None and now % ASK_EVERY == 0 and not seen.why_not:
        state, asked = _ask(state, seen, now)
        events += asked
    state, applied, orders = _apply(state, now + 1)
    return state, [*events, *applied], orders


def commanded(state: ActingState, commands: Sequence[Command], iteration: int) -> tuple[Outcome, list[str]]:
    """What people ask; and who asked for each event."""
    events: list[Event] = []
    actors: list[str] = []
    for command in commands:
        if command.kind == "rank":
            event: Control = CommandRefused(
                command="rank", by=command.by, reason="the ranks are not ours to start", user=command.user
            )
        else:
            event = state.queue.command(command)
        if isinstance(event, ModeChanged):
            event = msgspec.structs.replace(event, watermark=iteration)
        state = state.take(event)
        events.append(event)
        actors.append(command.by)
    state, applied, orders = _apply(state, iteration)
    return (state, [*events, *applied], orders), [*actors, *["controller"] * len(applied)]


def entered(state: ActingState, plan_version: int, iteration: int) -> tuple[ActingState, list[Event]]:
    """A rank reports a step under a plan that was issued."""
    plan = state.issued
    if plan is None or plan.plan_version != plan_version:
        return state, []
    applied = PlanApplied(
        plan_version=plan_version, digest=plan.digest, proposal=state.proposal, iteration=iteration,
        reason=f"the ranks follow {state.proposal}", plan=plan.to_data(), watermark=iteration,
    )  # fmt: skip
    trial = PlanTrial(plan=plan, old=state.plan, proposal=state.proposal, from_iteration=iteration)
    slow = state.slow.intersection(plan.ranks)
    level = None if state.cost is None else level_of(state.cost, state.plan, state.lately[-FORESEEN:])
    state = msgspec.structs.replace(state, plan=plan, issued=None, trial=trial, slow=slow, kept="", level=level)
    return state, [applied]


def handed(state: ActingState, order: HandOver, problem: str, iteration: int) -> tuple[ActingState, list[Event]]:
    """How handing a verdict on has gone; from then on it is measured whether anything is better."""
    if problem:
        return state, [PlanFailed(plan_version=state.plan.plan_version, proposal=order.proposal, reason=problem)]
    trial = PlanTrial(plan=state.plan, old=state.plan, proposal=order.proposal, from_iteration=iteration)
    (party,) = order.verdict.culprits
    note = Note(text=f"rank {party.rank} was handed to {state.hand_to}", by="controller", proposal=order.proposal)
    ranks = {rank for rank in (party.rank,) if rank is not None}
    return msgspec.structs.replace(state, trial=trial, handed=state.handed | ranks), [note]


def failed(state: ActingState, why: str) -> tuple[ActingState, list[Event]]:
    """The plan that was issued cannot reach the ranks."""
    if state.issued is None:
        return state, []
    event = PlanFailed(plan_version=state.issued.plan_version, proposal=state.proposal, reason=why)
    return msgspec.structs.replace(state, issued=None), [event]


def finished(state: ActingState) -> list[Event]:
    """The training ends: score what there is, close what is open."""
    why = "the run ended"
    events: list[Event] = [*state.queue.expire(why)]
    if state.issued is not None:
        events.append(PlanFailed(plan_version=state.issued.plan_version, proposal=state.proposal, reason=why))
    return [*_trial_over(state, why)[1], *events]


# --- asking ----------------------------------------------------------------------------------------------------------


def _ask(state: ActingState, seen: AttachedState, now: int) -> tuple[ActingState, list[Event]]:
    """The first actuator that gains enough; and, once for each reason, why there is none for a slow rank."""
    if state.queue.approved is not None or (situation := _situation(state, seen, now)) is None:
        return state, []
    reasons: dict[str, list[str]] = {}
    state = msgspec.structs.replace(state, times=situation.times)
    for actuator in ACTUATORS:
        proposal, why = actuator.propose(situation)
        if proposal is not None:
            return _propose(state, situation, proposal)
        reasons.setdefault(why, []).append(actuator.name)
    stays = situation.slow and state.plan.division is None
    kept, before = "; ".join(f"{', '.join(of)}: {why}" for why, of in reasons.items()) if stays else "", state.kept
    other = state.slow != situation.slow.keys()
    expired = state.queue.expire("other ranks are slow now, and it would gain too little") if other else []
    state = msgspec.structs.replace(state.take(*expired), kept=kept)
    if not kept or _NUMBER.sub("", kept) == _NUMBER.sub("", before):
        return state, [*expired]
    verdict = next(iter(situation.slow.values())).verdict
    return state, [*expired, PlanKept(plan_version=state.plan.plan_version, at_iteration=now, reason=kept, verdict=verdict)]


def _propose(state: ActingState, now: Situation, proposal: Proposal) -> tuple[ActingState, list[Event]]:
    open_ = state.queue.open
    if open_ is not None and open_.change == proposal.change:
        return state, []
    slow = next(iter(now.slow.values()), None)
    by = proposal.evidence["actuator"]
    reason = f"{by}: {slow.sentence}" if slow is not None else f"{by}: ranks wait for whoever was given the longest samples"
    events = state.queue.propose(proposal, None if slow is None else slow.verdict, reason, now.iteration, now.plan)
    state = state.take(*events)
    return msgspec.structs.replace(state, proposed_by=now.times, slow=frozenset(now.slow)), [*events]


def _situation(state: ActingState, seen: AttachedState, now: int) -> Situation | None:
    cost = None if seen.monitor.fitted is None else seen.monitor.fitted.model
    complete = [one for one in seen.seen if one.committed.log_complete]
    recent = complete[-RECENT:]
    if cost is None or len(recent) < LEAST_SEEN:
        return None
    ranks = 1 + max(seen.plan.ranks)
    offered = len(state.offers) >= len(seen.plan.ranks) or state.plan.division is not None
    division = state.division if offered else None
    times, fitted_on = times_of(recent, cost, ranks), 0
    known = _known(state)
    if division is not None and known:
        whole = {iteration for iteration, of in known.items() if _whole(of, division) == [*of]}
        both = [one for one in complete if one.committed.iteration in whole]
        fitted_on = len(both)
        if not division.window and fitted_on >= LEAST_FITTED:
            times = by_lengths(times, both, [known[one.committed.iteration] for one in both], division)
        elif state.times is not None:
            last = state.times
            times = msgspec.structs.replace(times, micro_batch_us=last.micro_batch_us, token_us=last.token_us,
                                            token2_us=last.token2_us, padded=last.padded)  # fmt: skip
        window = max(division.window, *(one.window for one in state.offers.values()), 1)
        near = [batch for of in known.values() for batch in of] + [*state.coming[: foreseen(window)]]
        batches = _whole(near, division)[-foreseen(window) :]
    else:
        division = division or Division(samples=(1,) * ranks)
        batches = [*like_seen(recent, division)]
    if not batches:  # each that was drawn is the short last one of its epoch, say
        return None
    return Situation(
        iteration=now,
        plan=seen.plan,
        division=division,
        times=times,
        batches=tuple(map(tuple, batches)),
        fitted_on=fitted_on,
        slow=slow_ranks(seen),
        offer=next(iter(state.offers.values()), None) if offered else None,
        hand_to=state.hand_to,
        handed=state.handed,
    )


def _whole(batches: Sequence[Sequence[float]], division: Division) -> list[Sequence[float]]:
    """Without the last of an epoch, which nobody's counts are for."""
    return [batch for batch in batches if len(batch) == division.total]


def _known(state: ActingState) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Iteration -> the global batches that were drawn in it, to be trained from it on."""
    known = dict[int, tuple[tuple[int, ...], ...]]()
    for iteration, batches in state.drawn:
        known[iteration] = (*known.get(iteration, ()), *batches)
    return known


def slow_ranks(seen: AttachedState) -> dict[int, Verdict]:
    """rank -> the open verdict by which it is slow."""
    verdicts = seen.monitor.verdicts
    named = {rank: verdicts[number] for rank, number in seen.monitor.detector.open.items() if number in verdicts}
    compared = {
        one.verdict.culprits[0].rank: one.verdict
        for (_, cause), one in seen.compared.items()
        if cause == "slow_device" and one.verdict.culprits
    }
    fewer = seen.plan.division.fewer if seen.plan.division is not None else frozenset()
    held_back = {one.verdict for one in seen.held_back.values() if one.culprits[0].rank not in fewer}
    found = {**{rank: one for rank, one in compared.items() if rank is not None}, **named}
    return {rank: one for rank, one in found.items() if one.verdict not in held_back and rank in seen.plan.ranks}


# --- applying and scoring ---------------------------------------------------------------------------------------------


def _apply(state: ActingState, iteration: int) -> Outcome:
    """Issue what is approved, one change at a time."""
    if state.issued is not None or state.trial is not None:
        return state, [], []
    events: list[Event] = [*state.queue.settle(iteration)]
    state = state.take(*(event for event in events if isinstance(event, Control)))
    if (approved := state.queue.approved) is None:
        return state, events, []
    version = state.versions + 1
    plan = Plan.from_data(approved.plan).renumbered(version)
    issued = PlanIssued(
        plan_version=version, proposal=approved.proposal, optional=True, plan=plan.to_data(), watermark=iteration
    )
    events.append(issued)
    state = msgspec.structs.replace(state.take(issued), proposal=approved.proposal, before=state.proposed_by, versions=version)
    if plan.digest == state.plan.digest:
        verdict = approved.evidence["verdict"]
        return state, events, [HandOver(approved.proposal, msgspec.convert(verdict, Verdict))]
    return msgspec.structs.replace(state, issued=plan), events, [Entering(plan)]


def _changed(before: frozenset[int], now: frozenset[int]) -> str:
    more, fewer = sorted(now - before), sorted(before - now)
    return f"rank {more[0]} turned slow" if more else f"rank {fewer[0]} is as fast as the others again"


def _since(found: Sequence[Event], now: int) -> int:
    """From when on iterations are of no use for the trial."""
    ended = [event.until_iteration for event in found if isinstance(event, VerdictClosed)]
    begun = [event.since_iteration for event in found if isinstance(event, Verdict)]
    return min([*ended, *begun, now])


def _tried(state: ActingState, released: IterationTelemetry) -> tuple[ActingState, list[Event]]:
    """With the iteration in the trial in progress: what the plan before would have taken on these very batches.

    Where the samples of a window are put together anew, no batch is that of before: there an iteration counts for as much of
    the window as is predicted of it, and the trial goes on to the end of a window, over most of those that it was predicted
    for.
    """
    trial, times, now = state.trial, state.before, released.committed.iteration
    division = state.division or Division(samples=(1,) * (1 + max(state.plan.ranks)))
    if trial is None or times is None or now < trial.from_iteration + SETTLING or not released.committed.log_complete:
        return state, []
    drawn = _known(state)
    last = max((iteration for iteration in drawn if iteration <= now), default=None)
    known = like_seen([released], division) if last is None else drawn[last]
    if len(_whole(known, division)) < len(known):
        return state, []
    old = trial.old.division if trial.old is not None else None
    before = old or Division(samples=_first_samples(state, division))
    predicted_us, baseline_us = times.mean_us(division, known), times.mean_us(before, known)
    if division.window and state.level is not None:
        of_step_us, longer_us = state.level.step_us(state.plan, released), state.level.longer_us
        predicted_us, baseline_us = of_step_us + longer_us, of_step_us * baseline_us / predicted_us + longer_us
    row = Row(now, predicted_us, baseline_us, took_us(released))
    trial = msgspec.structs.replace(trial, rows=(*trial.rows, row))
    steps = len(known) // times.micro_batches
    within = division.window and (trial.n * times.micro_batches < SCORE_BATCHES or now + 1 < (last or 0) + steps)
    if trial.n < SCORE_OVER or within:
        return msgspec.structs.replace(state, trial=trial), []
    return msgspec.structs.replace(state, trial=None), [trial.score()]


def _first_samples(state: ActingState, division: Division) -> tuple[int, ...]:
    """The loader's own counts."""
    return next((one.samples for one in state.offers.values()), division.samples)


def _trial_over(state: ActingState, why: str, at: int | None = None) -> tuple[ActingState, list[Event]]:
    if state.trial is None:
        return state, []
    return msgspec.structs.replace(state, trial=None), [score_plan(state.trial, why, at)]
