"""The rules of a controller: what happened -> what it decides. A live run, its replay and its backtest go by them.

A rule is pure: (state, what happened) -> (state, decisions). Times stand in what happened. What a rule decides to log changes
the state as the same events do when they are read back from the log: so a replay gives the rules the same causes, compares what
they decide, and takes what the run did from its record.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.health.probing import Probe, asked_for
from unskew.analytics.health.rejoining import LEAST_LEFT
from unskew.analytics.loop.adaptation import AdaptationStep
from unskew.analytics.loop.by_policy.follower import PolicyStopError
from unskew.analytics.loop.controller_state import (
    ControllerState,
    Decision,
    Issue,
    Log,
    MeasureIdle,
    Outcome,
    StartRank,
    StopRun,
)
from unskew.analytics.scheduler.replicas import returning
from unskew.collector.command import Command
from unskew.collector.events import (
    CommandRefused,
    Control,
    DeviceJoined,
    DeviceLost,
    FaultInjected,
    ModeChanged,
    Note,
    PlanApplied,
    PlanIssued,
    PlanKept,
    ProcessEnded,
    RankAdded,
    Regrouped,
    StandbyMeasured,
    Verdict,
)


def started(state: ControllerState) -> Outcome:
    """The run begins with its first plan."""
    return _issue(state, state.plans.first, "the run's first plan", abort=True, after=[state.adaptation.started()])


def taken_over(state: ControllerState) -> Outcome:
    """A new controller goes on from the log of one that died: what that one had logged and may not have done is done. A loss
    that no plan has answered yet is answered now."""
    why = "a new controller took over"
    coming = [StartRank(added, state.plans.latest) for added in state.rejoining.coming.values()]
    state, noted = _log(state, Note(text=f"{why}: {len(state.alive)} ranks go on", by="controller"))
    base, pending = state.plans.base, state.plans.pending
    if unanswered := sorted(state.rejoining.gone.intersection(base.ranks)):
        reason = f"{why}: {_named(unanswered)} lost meanwhile"
        if state.queue.mode == "observe":
            return state, [*noted, StopRun(f"{reason} and mode observe changes nothing: the run stops")]
        try:
            state, plan, _ = _without(state, base, {*unanswered})
        except PlanError as error:
            return state, [*noted, _no_plan(state, error, {*unanswered})]
        state, issued = _issue(state, plan, reason, abort=True, after=state.plans.give_up(reason))
        return state, [*noted, *issued, *coming]
    if pending is None:
        return state, [*noted, *coming]
    abort = not pending.optional
    leaving = _leaving(state, pending.plan, abort=abort)
    again = Issue(plan=pending.plan, proposal=pending.proposal, reason=why, abort=abort, leaving=leaving)
    return state, [*noted, again, *coming]


def joined(state: ControllerState, event: DeviceJoined) -> Outcome:
    """A rank has started."""
    return _log(state, event)


def committed(state: ControllerState, released: IterationTelemetry) -> Outcome:
    """One whole committed iteration: judge it, then act, unless another plan is on its way or the run is over."""
    plan = state.plans.by_plan_version[released.committed.plan_version]
    adaptation, step = state.adaptation.observe(released, plan, state.alive)
    state = msgspec.structs.replace(state, adaptation=adaptation, committed=released.committed.iteration + 1)
    state, logged = _log(state, *step.events)
    if plan.plan_version != state.plans.latest.plan_version or state.committed >= state.queue.iterations:
        return state, [step.judged, *logged]
    state, answered = _answer(state, step, plan)
    state, issued = _apply_approved(state)
    state, started = _start_lost(state)
    state, returned = _return_replicas(state)
    return state, [step.judged, *logged, *answered, *issued, *_measure_idle(state), *started, *returned]


def lost(state: ControllerState, event: DeviceLost) -> Outcome:
    """A rank's process has ended: name it, then reroute its work; on standby it had none."""
    rank, iteration, why = event.rank, event.iteration or 0, f"rank {event.rank} was lost"
    involved = rank in state.plans.involved
    adaptation, found = state.adaptation.lost(Suspect.of(event), iteration)
    state = msgspec.structs.replace(state, adaptation=adaptation)
    given_up = state.plans.give_up(why) if involved else []
    state, decisions = _log(state, event, *found, *state.queue.expire(why), *given_up)
    if state.queue.mode == "auto" and (no_more := state.rejoining.given_up(rank, adaptation.site.respawns)):
        state, noted = _log(state, Note(text=no_more, by="controller"))
        decisions += noted
    if not involved:
        return state, decisions
    if state.queue.mode == "observe":
        return state, [*decisions, StopRun(f"{why} ({event.detail}) and mode observe changes nothing: the run stops")]
    base = state.plans.base
    try:
        state, plan, how = _without(state, base, {rank})
    except PlanError as error:
        return state, [*decisions, _no_plan(state, error, {rank})]
    verdict = next((one.verdict for one in found if isinstance(one, Verdict)), None)
    expected_us = adaptation.expected_us(plan)
    proposed = state.queue.recovery(plan, base, f"{why}: {how}", verdict=verdict, iteration=iteration, expected_us=expected_us)
    reason, name = f"{why} ({event.how})", proposed[0].proposal
    state, issued = _issue(state, plan, reason, abort=True, proposal=name, after=proposed)
    return state, [*decisions, *issued]


def can_spare(state: ControllerState, rank: int) -> bool:
    """Whether the others can go on without a rank that may come back."""
    if rank not in state.plans.involved:
        return True
    try:
        _without(state, state.plans.base, {rank})
    except PlanError:
        return False
    return state.queue.mode != "observe"


def ended(state: ControllerState, event: ProcessEnded) -> Outcome:
    """The process of a rank that was lost while it was there has ended."""
    return _log(state, event)


def cut_off(state: ControllerState, reason: str) -> Outcome:
    """Ranks cannot go on although none was lost: the same plan again."""
    note = Note(text=f"{reason}: regrouping with the same plan", by="controller")
    plan = state.plans.base.renumbered(state.plans.next_plan_version)
    return _issue(state, plan, reason, abort=True, after=[note, *state.plans.give_up(reason)])


def applied(state: ControllerState, event: PlanApplied, regrouped: Regrouped) -> Outcome:
    """Every living member acts on the plan."""
    pending = state.plans.pending
    adaptation, over = state.adaptation.applied(
        Plan.from_data(event.plan), event.proposal, regrouped, before=state.plans.applied, old=pending.old if pending else None
    )
    return _log(msgspec.structs.replace(state, adaptation=adaptation), *over, event, regrouped)


def injected(state: ControllerState, event: FaultInjected) -> Outcome:
    """A fault is about to be carried out."""
    return _log(msgspec.structs.replace(state, adaptation=state.adaptation.injected(event)), event)


def measured(state: ControllerState, product: StandbyMeasured) -> Outcome:
    """A rank that executes nothing has multiplied its matrix; what slowdown that is, is found here."""
    adaptation, events = state.adaptation.measured(product)
    return _log(msgspec.structs.replace(state, adaptation=adaptation), *events)


def commanded(state: ControllerState, commands: Sequence[Command]) -> Outcome:
    """What people ask."""
    decisions: list[Decision] = []
    for command in commands:
        if command.kind in ("rank", "probe"):
            state, logged = (_add_rank if command.kind == "rank" else _probe_asked)(state, command)
        else:
            event = state.queue.command(command, lack=_lack(state))
            if isinstance(event, ModeChanged):
                event = msgspec.structs.replace(event, watermark=state.committed)
            state, logged = _log(state, event, actor=command.by)
        decisions += logged
    state, issued = _apply_approved(state)
    return state, [*decisions, *issued]


def finished(state: ControllerState) -> Outcome:
    """The run ends: score what there is, close what is open."""
    why = "the run ended"
    return _log(state, *state.adaptation.finished(), *state.queue.expire(why), *state.plans.give_up(why))


def _answer(state: ControllerState, step: AdaptationStep, plan: Plan) -> Outcome:
    """What becomes of the Scheduler's answer, or of a wish to probe: that holds training up, so not in mode observe."""
    iteration = step.judged.iteration
    if step.probe is not None:
        if state.queue.mode == "observe" or state.plans.pending is not None or state.adaptation.site.by_replica:
            return state, []
        again = plan.renumbered(state.plans.next_plan_version)
        return _issue(state, again, f"probe: {step.reason}", abort=False, probe=step.probe)
    if step.proposal is not None:
        return _log(state, *state.queue.propose(step.proposal, step.verdict, step.reason, iteration, plan))
    if not step.reason:
        return state, []
    kept = PlanKept(plan_version=plan.plan_version, at_iteration=iteration, reason=step.reason, verdict=step.verdict)
    return _log(state, kept, *state.queue.expire(step.reason))


def _apply_approved(state: ControllerState) -> Outcome:
    """Issue the approved plan; one change at a time."""
    if state.plans.pending is not None:
        return state, []
    state, decisions = _log(state, *state.queue.settle(state.committed, lack=_lack(state)))
    approved = state.queue.approved
    if approved is None:
        return state, decisions
    plan = Plan.from_data(approved.plan).renumbered(state.plans.next_plan_version)
    reason = f"approved by {state.queue.approved_by}"
    state, issued = _issue(state, plan, reason, abort=False, proposal=approved.proposal)
    return state, [*decisions, *issued]


def _lack(state: ControllerState) -> str:
    """Why ranks have no room for the open proposal; "" where they have, or none is open."""
    room, proposed = state.adaptation.site.room, state.queue.open
    return "" if room is None or proposed is None else room.lack(Plan.from_data(proposed.plan), state.plans.in_force)


def _measure_idle(state: ControllerState) -> list[Decision]:
    """Now and then the ranks that execute nothing measure themselves; it holds nobody up, so in every mode."""
    idle = state.alive - state.plans.in_force.executors
    if state.committed % state.adaptation.options.probing.standby_every:
        idle &= state.adaptation.measurements.joining
    return [MeasureIdle(tuple(sorted(idle)), state.committed)] if idle and state.plans.pending is None else []


def _start_lost(state: ControllerState) -> Outcome:
    """Mode auto starts lost ranks again."""
    if state.queue.mode != "auto" or state.queue.iterations - state.committed < LEAST_LEFT:
        return state, []
    return _start(state, *state.rejoining.due(state.committed, state.adaptation.site.respawns))


def _return_replicas(state: ControllerState) -> Outcome:
    """A replica that is whole again comes back; one change at a time."""
    if not state.adaptation.site.by_replica or state.plans.pending is not None:
        return state, []
    plan = state.plans.in_force
    back = returning(state.plans.first, plan, state.alive - state.adaptation.measurements.joining)
    if not back:
        return state, []
    adaptation, wider = state.adaptation.returned(plan, state.alive, state.committed)
    state = msgspec.structs.replace(state, adaptation=adaptation)
    if wider is None:
        return state, []
    plan = wider.renumbered(state.plans.next_plan_version)
    return _issue(state, plan, f"replica {', '.join(map(str, back))} is whole again", abort=False)


def _without(state: ControllerState, base: Plan, dead: set[int]) -> tuple[ControllerState, Plan, str]:
    """The plan after the loss of these ranks, and what becomes of their work. Raises `PlanError` when there is none."""
    number, spares = state.plans.next_plan_version, state.alive - state.plans.involved
    adaptation, plan, how = state.adaptation.without(dead, base, state.alive, state.committed, number=number, spares=spares)
    return msgspec.structs.replace(state, adaptation=adaptation), plan, how


def _no_plan(state: ControllerState, error: PlanError, dead: set[int]) -> StopRun:
    """The end of a run that has no plan after the loss of these ranks; who was lost before has its part in that."""
    before = sorted(state.rejoining.gone - dead)
    also = f" (lost before: {_named(before)})" if before else ""
    return StopRun(f"{error}{also}", no_plan=not isinstance(error, PolicyStopError))


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _add_rank(state: ControllerState, command: Command) -> Outcome:
    """Somebody asks for a process."""
    site, iterations = state.adaptation.site, state.queue.iterations
    answer = state.rejoining.command(command, state.committed, iterations=iterations, most_ranks=site.most_ranks)
    return _start(state, answer, actor=command.by)


def _probe_asked(state: ControllerState, command: Command) -> Outcome:
    """Somebody wants a rank measured, in any mode; its result comes as every probe's does."""
    plan, adaptation, busy = state.plans.in_force, state.adaptation, state.plans.pending is not None
    known, by_replica = adaptation.measurements.references, adaptation.site.by_replica
    answer = asked_for(command, plan.ranks, state.alive & plan.executors, known, by_replica=by_replica, busy=busy)
    if isinstance(answer, CommandRefused):
        return _log(state, answer, actor=command.by)
    again, probe = plan.renumbered(state.plans.next_plan_version), Probe(ranks=(int(command.target),))
    return _issue(state, again, f"probe: {command.by} asked for it", abort=False, probe=probe, after=[answer])


def _start(state: ControllerState, *answers: RankAdded | CommandRefused, actor: str = "controller") -> Outcome:
    state, decisions = _log(state, *answers, actor=actor)
    added = [one for one in answers if isinstance(one, RankAdded)]
    return state, [*decisions, *(StartRank(one, state.plans.latest) for one in added)]


def _issue(
    state: ControllerState,
    plan: Plan,
    reason: str,
    *,
    abort: bool,
    proposal: str = "",
    probe: Probe | None = None,
    after: Sequence[Control] = (),
) -> Outcome:
    """Log a plan, in one batch `after` what led to it, then send it."""
    leaving = _leaving(state, plan, abort=abort)
    issued = PlanIssued(
        plan_version=plan.plan_version, proposal=proposal, optional=not abort, plan=plan.to_data(), watermark=state.committed,
        peak_bytes=state.adaptation.site.peak_bytes(plan, state.plans.in_force),
    )  # fmt: skip
    send = Issue(plan=plan, proposal=proposal, reason=reason, abort=abort, leaving=leaving, probe=probe)
    state, logged = _log(state, *after, issued)
    return state, [*logged, send]


def _leaving(state: ControllerState, plan: Plan, *, abort: bool) -> tuple[int, ...]:
    """Who hands its layers over before `plan` and has no role in it."""
    return tuple(sorted(() if abort else state.alive.intersection(state.plans.in_force.ranks) - {*plan.ranks}))


def _log(state: ControllerState, *events: Control, actor: str = "controller") -> Outcome:
    """Log `events` as one batch; they are in the state at once."""
    for event in events:
        state = state.take(event)
    return state, [Log(events, actor)] if events else []
