"""A run's log -> what was wrong, who did it, what it cost, and what cannot be said for want of data.

Four observabilities, the best that the log allows:

1. chunks: forward and backward times per micro-batch. The Detector judges devices; replay shows what each cause cost;
2. collectives only, with waiting inside: under a barrier the culprit is the rank that waits least (ranks/waiting.py);
3. flight recorders: who did not join which collective (flight_recorder.py);
4. iteration times only: nobody to name.

The whole job is judged in each of them: where every rank is slower alike, none differs from the others. In our own runs and in
those that were watched it is judged with the devices (loop/monitor.py), else by itself (whole_job.py).

Pure: a `RunLog` in, a `Diagnosis` out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Literal

import msgspec

from unskew.analytics.core.outcome import (
    LEAST_STATED_SHARE,
    Findings,
    Outcome,
    OutcomeWord,
    Sight,
    UnexplainedTime,
    blindness,
    outcome_of,
    since_and_until,
)
from unskew.analytics.core.outcome import seen as would_have_seen
from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.detector.job_wide import JobWideOptions
from unskew.analytics.detector.next_steps import with_next_step
from unskew.analytics.detector.options import options_for
from unskew.analytics.detector.verdicts import devices, lost_verdict
from unskew.analytics.diagnosis.capacity import idle_s
from unskew.analytics.diagnosis.causes import LEAST_SHARE, clears_all, faults, named
from unskew.analytics.diagnosis.coverage import earlier_attempts, gaps_of, one_is_fast
from unskew.analytics.diagnosis.failslow import loss_of
from unskew.analytics.diagnosis.flight_recorder import HangDiagnosis, explain
from unskew.analytics.diagnosis.ranks.rank_times import follow_steps
from unskew.analytics.diagnosis.ranks.waiting import follow_collectives
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.sections import next_number, sections_of
from unskew.analytics.diagnosis.trace.lost import LOCATED, ORDER, WITHOUT_CAUSE, LostTime, time_lost
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.diagnosis.whole_job import judge_job, times_of
from unskew.analytics.health.liveness import Suspect
from unskew.collector.events import COLLECTIVE_KINDS, PlanApplied, Verdict
from unskew.collector.log_gap import dropped_sentence

OR_LONGER = "all ranks are slower alike or their data is longer, which cannot be told without document lengths"

Observability = Literal["chunks", "collectives", "flight recorder", "iterations", "nothing"]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """`time_lost_s`: cause -> device-seconds, then the places of what has no cause, `unexplained` last; empty where it cannot
    be measured. `abstained`: what cannot be said, and which data is missing for it, a sentence each. `outcome`,
    `smallest_slowdown`, `why`: as in `Outcome`. `status`: the run's, "unfinished" before its end. `looked_at`: which
    part of a long run; `time_lost_s` is as if the rest had been like it; "" = all."""

    run_id: str
    observability: Observability
    iterations: int
    verdicts: tuple[Verdict, ...]
    time_lost_s: dict[str, float]
    abstained: tuple[str, ...]
    outcome: OutcomeWord
    smallest_slowdown: float | None
    why: str
    status: str
    looked_at: str = ""

    @property
    def sentence(self) -> str:
        """The outcome as a headline."""
        return Outcome(outcome=self.outcome, smallest_slowdown=self.smallest_slowdown, why=self.why).sentence


def observability(log: RunLog) -> Observability:
    """The most that the log lets us see."""
    if log.trace.has_chunks or any(one.committed.chunks for one in log.released):
        return "chunks"
    if log.trace.kinds & set(COLLECTIVE_KINDS):
        return "collectives"
    if log.flights or log.flight_groups:
        return "flight recorder"
    return "iterations" if log.iterations.height else "nothing"


def diagnose(log: RunLog) -> Diagnosis:
    """The diagnosis of one run."""
    seen = observability(log)
    sights: list[Sight] = []
    verdicts: tuple[Verdict, ...] = ()
    sections: list[TraceSection] = []
    gaps: list[str] = []
    lost_s, whole_s, independent = dict[str, float](), 0.0, False
    findings: Findings | None = None
    abstained = ([log.sample.unseen] if log.sample else []) + _missing(log, seen)
    if seen == "chunks":
        sections, findings, problems = sections_of(log)
        verdicts, sights = findings.verdicts, [findings.sight]
        abstained += problems
        measured, gaps = _measured(sections, verdicts)
        if measured:
            more = named(measured, next_number(verdicts), options_for(log.device_kind).digest, one_is_fast(log, sections))
            beside = _beside(log, more, findings)
            lost_s = _device_seconds(log, measured, verdicts + beside)
            verdicts = _in_order(log, verdicts, beside, lost_s)
            whole_s = _of_all(log) * sum(len(section.ranks) * float(lost.measured_us.sum()) / 1e6 for section, lost in measured)
            abstained += _without_cause(lost_s, whole_s)
    elif seen == "collectives":
        judged, problems = follow_collectives(log, options_for(log.device_kind))
        verdicts = tuple(verdict for of_plan in judged for verdict in of_plan.verdicts)
        sights = [of_plan.sight for of_plan in judged]
        abstained += problems
    elif seen == "iterations":
        of_ranks, independent = follow_steps(log.steps, options_for(log.device_kind))
        verdicts, sights = of_ranks.verdicts, [of_ranks.sight] if independent or log.ranks > 1 else []
    elif seen == "flight recorder":
        standstill = explain(log.flights, log.flight_groups)
        verdicts = _hung(standstill)
        abstained += [f"hung: {standstill.abstained}"] if standstill.abstained else []
    if seen != "chunks" or not log.released:
        verdicts += _lost(log, next_number(verdicts))
    unexplained = _unexplained(lost_s, whole_s)
    if log.iterations.height and (findings is None or findings.of_job is None):
        findings = judge_job(
            times_of(log, verdicts, independent=independent), next_number(verdicts), alone=seen == "iterations"
        )
        if seen == "chunks" and not sections and not log.released:
            sights = [_without_replay(sight, findings.sight) for sight in sights]
        if seen == "chunks" and (log.attached or not log.released):
            longer = [f"{since_and_until(one)}: {OR_LONGER}" for one in findings.verdicts]
            gaps, abstained = [*gaps, *longer], [*abstained, *(f"unknown: {one}" for one in longer)]
        else:
            verdicts += findings.verdicts
    if findings is not None and findings.of_job is not None:
        sights.append(findings.of_job)
        unexplained = (_located if log.released and seen == "chunks" else _worse)(unexplained, findings.long_ones)
    gaps = [*gaps_of(log, chunks=seen == "chunks", sections=sections), *gaps]
    outcome = outcome_of(
        holding := _urgent_first(log, faults(verdicts)),
        sights,
        failure=log.failure,
        lacks=_lacks(log),
        gaps=gaps,
        dropped=log.dropped,
        unexplained=unexplained,
        costs=[*(one.sentence for one in verdicts if clears_all(one)), *_without_cores(lost_s, whole_s)],
        ended=len(faults(verdicts)) - len(holding),
    )
    return Diagnosis(
        run_id=log.run,
        observability=seen,
        iterations=log.iterations.height,
        verdicts=tuple(
            with_next_step(one, can_be_probed=log.can_be_probed, watched=log.attached, taken_over=_taken_over(log, one))
            for one in verdicts
        ),
        time_lost_s=lost_s,
        abstained=(
            *abstained,
            *_hidden(
                faults(verdicts),
                [log.failure, *_lacks(log), *gaps, findings.undecided if findings else "", dropped_sentence(log.dropped)],
            ),
        ),
        outcome=outcome.outcome,
        smallest_slowdown=outcome.smallest_slowdown,
        why="; ".join([outcome.why, *([f"looked at {log.sample.what}"] if log.sample else [])]),
        looked_at=log.sample.what if log.sample else "",
        status=log.status,
    )


def _measured(
    sections: Sequence[TraceSection], verdicts: Sequence[Verdict]
) -> tuple[list[tuple[TraceSection, LostTime]], list[str]]:
    """The sections with where their time was lost, and why some have none."""
    measured = [(section, time_lost(section, verdicts)) for section in sections]
    why = [lost.why_unknown for _, lost in measured if lost.why_unknown]
    return [(section, lost) for section, lost in measured if not lost.why_unknown], why


def _beside(log: RunLog, named: Sequence[Verdict], findings: Findings) -> tuple[Verdict, ...]:
    """Those verdicts whose cause the Detector has not named; not one on a stage, all of whose ranks were slow by a product when
    the run began: that nobody knows which it is stands in the findings' sight."""
    found, known = list[Verdict](), {verdict.cause for verdict in findings.verdicts}
    roles = log.plans[min(log.plans)].roles if log.plans else ()
    for verdict in named:
        stages = {party.stage for party in verdict.culprits} - {None}
        ranks = [role.rank for role in roles if role.stage in stages]
        if verdict.cause not in known and not (ranks and findings.suspects.issuperset(ranks)):
            found.append(verdict)
    return tuple(found)


def _taken_over(log: RunLog, verdict: Verdict) -> bool:
    """Whether a plan did without the culprits after the last that had them when they were lost; they may have come back since.
    Of a training that is not ours nobody knows."""
    ranks = {party.rank for party in verdict.culprits}
    since = {event.plan_version: event.iteration for event in log.control if isinstance(event, PlanApplied)}
    had = [version for version, plan in log.plans.items() if ranks & {*plan.ranks}]
    last = max((version for version in had if since.get(version, 0) <= verdict.at_iteration), default=None)
    return last is None or log.attached or any(version > last for version in log.plans.keys() - had)


def _in_order(
    log: RunLog, verdicts: tuple[Verdict, ...], beside: tuple[Verdict, ...], lost_s: Mapping[str, float]
) -> tuple[Verdict, ...]:
    """A run of ours has its verdicts in the order of their time; else the costliest is first."""
    first = not log.released and _costliest(beside, lost_s) > _costliest(verdicts, lost_s)
    return beside + verdicts if first else verdicts + beside


def _urgent_first(log: RunLog, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """For the headline: what stood open in the run itself, what waits for a person first, what a plan has answered last. Of a
    run that goes on what holds now, as every screen has it."""
    state = reduce(fold, log.control, RunState())
    places = {(one.verdict.cause, one.verdict.culprits): place for place, one in enumerate(state.by_urgency)}
    held = [one for one in verdicts if log.end != "running" or state.holds(one)]
    return sorted(held, key=lambda one: places.get((one.cause, one.culprits), len(places)))


def _costliest(verdicts: Sequence[Verdict], lost_s: Mapping[str, float]) -> float:
    """Device-seconds of the costliest cause among them."""
    return max((lost_s.get(one.cause, 0.0) for one in verdicts), default=0.0)


def _lacks(log: RunLog) -> list[str]:
    """What the log lacks by its own word, or for want of a last one."""
    lost = ["the run ended without a word of how, and its log does not show why"] if log.end == "lost" else []
    return [*([log.gap] if log.gap else []), *lost]


def _hidden(verdicts: Sequence[Verdict], lacks: Sequence[str]) -> list[str]:
    """How the run ended and what its log lacks, beside verdicts; else it is the outcome's reason."""
    return [f"what else is wrong: {one}" for one in lacks if one and verdicts]


def _without_replay(of_devices: Sight, of_job: Sight) -> Sight:
    """Chunks that cannot be replayed do not show what passed between them: iteration times alone do."""
    if of_devices.smallest_slowdown is None:
        return of_devices
    between = "what passed between chunks cannot be replayed"
    if not of_job.sees:
        why = f"{between}, and {blindness(of_job)}"
        return Sight(scope=of_devices.scope, smallest_slowdown=None, why=why)
    why = "; ".join([*([of_devices.why] if of_devices.why else []), f"{between}; by iteration times {would_have_seen(of_job)}"])
    return msgspec.structs.replace(of_devices, why=why)


def _hung(standstill: HangDiagnosis) -> tuple[Verdict, ...]:
    """Who holds up a job that makes no progress; a dump knows no iterations."""
    if not standstill.culprits:
        return ()
    return (
        Verdict(
            verdict=1,
            cause="hung",
            culprits=devices(standstill.culprits),
            victims=devices(standstill.victims),
            since_iteration=0,
            at_iteration=0,
            confidence=1.0,
            sentence="; ".join(standstill.sentences),
            evidence={"how": "hung", "waits": msgspec.to_builtins(standstill.waits)},
        ),
    )


def _device_seconds(
    log: RunLog, measured: Sequence[tuple[TraceSection, LostTime]], verdicts: Sequence[Verdict]
) -> dict[str, float]:
    """cause -> device-seconds over all sections, what the groups of the dead cost until the survivors went on, and the capacity
    that was lost with them."""
    found = dict.fromkeys(("dead", "hung", *ORDER, *LOCATED, "unexplained"), 0.0)
    for section, lost in measured:
        devices = len(section.ranks)
        for cause, us in lost.parts.items():
            found[cause] += _of_all(log) * devices * float(us.sum()) / 1e6
    for plan_version, how in _recoveries(log).items():
        devices = len(log.plans[plan_version].ranks) if plan_version in log.plans else 0
        found["dead" if how == "exit" else "hung"] += devices * log.regrouped_s[plan_version]
    for cause, seconds in idle_s(log, verdicts).items():
        found[cause] += _of_all(log) * seconds
    rounded = {cause: round(seconds, 3) for cause, seconds in found.items()}
    return {cause: seconds for cause, seconds in rounded.items() if seconds or cause == "unexplained"}


def _of_all(log: RunLog) -> float:
    """The time of all iterations, for one of those that were looked at."""
    if log.sample is None:
        return 1.0
    us = {iteration: float(us) for iteration, us in log.iterations.drop_nulls().iter_rows()}
    looked = sum(us.get(i, 0.0) for first, last in log.sample.stretches for i in range(first, last + 1))
    return sum(us.values()) / looked if looked else 1.0


def _recoveries(log: RunLog) -> dict[int, str]:
    """Plan version in which survivors found together again -> how the first that it was about was lost.

    It is the first one behind the last plan with the lost rank; a rank without a role is missed by nobody.
    """
    found: dict[int, str] = {}
    for lost in log.lost:
        last = max((plan_version for plan_version, plan in log.plans.items() if lost.rank in plan.ranks), default=None)
        after = [] if last is None else [plan_version for plan_version in log.regrouped_s if plan_version > last]
        if after:
            found.setdefault(min(after), lost.how)
    return found


def _lost(log: RunLog, number: int) -> tuple[Verdict, ...]:
    """The losses that the run itself saw, of a log that shows no chunks beside them."""
    digest = options_for(log.device_kind).digest
    lost = [loss_of(log, event) for event in log.lost]
    return tuple(lost_verdict(number + i, Suspect.of(one), one.iteration or 0, digest) for i, one in enumerate(lost))


def _unexplained(time_lost_s: dict[str, float], whole_s: float) -> UnexplainedTime | None:
    lost_s = sum(time_lost_s.values())
    if not whole_s or not lost_s:
        return None
    places = {place: time_lost_s.get(place, 0.0) for place in WITHOUT_CAUSE}
    unexplained_s, most = sum(places.values()), max(places, key=lambda place: places[place])
    return UnexplainedTime(
        of_lost=unexplained_s / lost_s, of_measured=unexplained_s / whole_s, where=f"; most of it {WITHOUT_CAUSE[most]}"
    )


def _located(by_replay: UnexplainedTime | None, as_live: UnexplainedTime | None) -> UnexplainedTime | None:
    """What the loop would have said of the time without a cause, which decides, with the place where a replay finds most."""
    if as_live is None or as_live.where or by_replay is None:
        return as_live
    return msgspec.structs.replace(as_live, where=by_replay.where)


def _worse(one: UnexplainedTime | None, other: UnexplainedTime | None) -> UnexplainedTime | None:
    """Of two accounts of the time without a cause the first, unless only the other makes a run undecided."""
    return other if one is None or (other is not None and other.too_much and not one.too_much) else one


def _without_cause(time_lost_s: dict[str, float], whole_s: float) -> list[str]:
    """Where much time was lost for no cause that the log shows, a sentence each."""
    return [
        f"time lost: {100 * time_lost_s[place] / whole_s:.1f} % of the time {how}"
        for place, how in WITHOUT_CAUSE.items()
        if time_lost_s.get(place, 0.0) >= LEAST_SHARE * whole_s
    ]


def _without_cores(time_lost_s: Mapping[str, float], whole_s: float) -> list[str]:
    """That ranks had no core, where that may have cost much: what else wants the machine's cores, no log shows."""
    share = time_lost_s.get("no_core", 0.0) / whole_s if whole_s else 0.0
    return [f"up to {100 * share:.1f} % of the time was lost as ranks had no core"] if share >= LEAST_STATED_SHARE else []


def _missing(log: RunLog, seen: Observability) -> list[str]:
    """What cannot be said of this run, whatever its times."""
    kinds = log.trace.kinds
    found = []
    if seen == "nothing":
        return ["everything: the log holds no iteration"]
    if seen == "flight recorder":
        return ["every other cause: a flight recorder's dump holds no times of work"]
    if seen != "chunks":
        found.append("long_sequences, stage_imbalance, time lost: no forward and backward times per micro-batch")
    if seen == "iterations":
        found.append("slow_device, slow_link: neither chunk nor collective times")
        n, needed = log.iterations.height, JobWideOptions().least_past
        if n < needed:
            found.append(f"unknown: {n} iteration{'s' * (n != 1)}, at least {needed} are needed to judge the whole job")
    elif not kinds & {"send", "recv"}:
        found.append("slow_link: no times of messages between ranks")
    elif not log.released:
        found.append("slow_link: only messages of our own runs with their chunks are judged")
    elif not options_for(log.device_kind, links=log.times_messages).links:
        found.append("slow_link: messages between processes that share cores, or are emulated, measure no link")
    if "data_wait" not in kinds:
        found.append("input_bound: no data_wait spans")
    if "gc" not in kinds:
        found.append("gc_pause: no gc spans")
    found += earlier_attempts(log)
    if log.imported:
        found.append("dead, hung: no exits and heartbeats in an imported run")
    return found
