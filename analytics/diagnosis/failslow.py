"""The Detector over a finished log: the code that runs live, fed with what the log holds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise

import msgspec
import numpy as np

from unskew.analytics.core.cost import CostModel, GradientSync
from unskew.analytics.core.outcome import Findings, Sight, closest
from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.detector.options import options_for
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.site import Site
from unskew.analytics.predictor.retraining import IterationSample
from unskew.analytics.replay.rehearsal import ControllerRehearsal, Rehearsal
from unskew.analytics.shards.together import LayerSums
from unskew.collector.events import (
    AdaptationStarted,
    Control,
    DeviceLost,
    PlanApplied,
    Verdict,
    VerdictClosed,
)

TOO_SHORT = Sight(
    scope="device",
    smallest_slowdown=None,
    why="the log has too few complete iterations to learn what work should take",
)


class FailSlowResult(msgspec.Struct, frozen=True):
    """Findings with verdicts as they are at the end, the last predictor (None when none could be fitted), and the complete
    iterations with what was estimated of the devices in each."""

    findings: Findings
    cost: CostModel | None
    seen: tuple[IterationSample, ...] = ()


def followed(rehearsal: Rehearsal) -> tuple[IterationSample, ...]:
    """Run it; all iterations that were learned from, each with the speeds that are known of it by now."""
    seen: dict[int, IterationSample] = {}

    def look(*_: object) -> None:
        seen.update((one.committed.iteration, one) for one in rehearsal.monitor.retraining.seen)

    rehearsal.onlooker = look
    rehearsal.run()
    return tuple(seen.values())


def follow_run(log: RunLog) -> FailSlowResult:
    """One of our own runs again by the controller's rules and today's thresholds: predictors learned on the way, losses, plans,
    probes and measurements on standby where the run had them."""
    rehearsal = rehearsal_of(log)
    seen, monitor = followed(rehearsal), rehearsal.monitor
    verdicts = settled(event for event in rehearsal.made if isinstance(event, Verdict | VerdictClosed))
    if monitor.fitted is None:
        return FailSlowResult(Findings(verdicts=verdicts, sight=TOO_SHORT), None, seen)
    adaptation, last = rehearsal.state.adaptation, log.plans[log.released[-1].committed.plan_version]
    *of_devices, of_job = adaptation.sights(last)
    findings = Findings(
        verdicts=verdicts,
        sight=closest(of_devices),
        of_job=of_job,
        long_ones=monitor.unexplained,
        suspects=adaptation.suspects(last),
    )
    return FailSlowResult(findings, monitor.fitted.model, seen)


def rehearsal_of(log: RunLog) -> ControllerRehearsal:
    """The rules with what befell the run, before the first iteration."""
    control = [_completed(log, event) for event in log.control]
    return ControllerRehearsal(control, log.released, Adaptation.begin(_site(log)))


def _site(log: RunLog) -> Site:
    """The place, without what a change of plan costs: none is sought."""
    started = next((event.site for event in log.control if isinstance(event, AdaptationStarted)), {})
    return Site(
        origin=log.plans[min(log.plans)],
        iterations=len(log.released),
        first_iteration=started.get("first_iteration", 0),
        shared_cores=started.get("shared_cores"),
        detector=options_for(log.device_kind, links=log.times_messages),
        blocking_sends=log.blocking_sends,
        sync=msgspec.convert(started.get("sync"), GradientSync | None),
        layer_sums=msgspec.convert(started.get("layer_sums", ()), LayerSums),
        classes=log.classes,
    )


def _completed(log: RunLog, event: Control) -> Control:
    """The event with what old versions did not record of it: when it came, of a loss also who waited."""
    match event:
        case PlanApplied(watermark=None):
            return msgspec.structs.replace(event, watermark=event.iteration)
        case DeviceLost():
            return loss_of(log, event)
        case _:
            return event


def loss_of(log: RunLog, lost: DeviceLost) -> DeviceLost:
    """As the run saw it. Old versions recorded neither when nor who waited: then it was before the first iteration that went on
    without the rank, at the end where none did, and all that had a role beside it waited."""
    if lost.iteration is not None:
        return lost
    under = [(one.committed.iteration, log.plans[one.committed.plan_version].ranks) for one in log.released]
    last = under[-1][0] if under else int(log.iterations["iteration"].max() or 0)  # type: ignore[arg-type]  # of any dtype
    without = (now for (_, before), (now, after) in pairwise(under) if lost.rank in before and lost.rank not in after)
    gone = next(without, last + 1)
    with_it = [plan.ranks for plan in log.plans.values() if lost.rank in plan.ranks]
    others = tuple(rank for rank in with_it[-1] if rank != lost.rank) if with_it else ()
    return msgspec.structs.replace(lost, watermark=gone, iteration=min(gone, last), victims=lost.victims or others)


def as_slow(section: TraceSection, verdicts: Iterable[Verdict]) -> TraceSection:
    """The section in which ranks and replicas that were named are expected to take what they would at their healthy speed. Of
    one stage, where forward and backward explain each other, that is what the others take in the same iteration; where lengths
    are logged, it is what these let expect already."""
    if section.lengths_logged:
        return section
    operations, expected = section.recording.graph.operations, section.expected_us.copy()
    numbers, work_us = np.array(section.recording.iterations), section.parts.work_us
    for verdict in verdicts:
        until = verdict.until_iteration
        during = (numbers >= verdict.since_iteration) & (numbers < until if until is not None else True)
        ranks, replicas = ({getattr(party, who) for party in verdict.culprits} - {None} for who in ("rank", "replica"))
        for (kind, _), members in section.cells.items():
            mine = [i for i in members if operations[i].rank in ranks or operations[i].replica in replicas]
            others = [i for i in members if i not in mine] if len(section.stages) == 1 else []
            if mine and others:
                expected[np.ix_(mine, during)] = np.median(work_us[np.ix_(others, during)], axis=0)
            else:
                expected[np.ix_(mine, during)] *= verdict.speed.get(kind, 1.0)
    return msgspec.structs.replace(section, expected_us=expected)


def settled(verdicts: Iterable[Verdict | VerdictClosed]) -> tuple[Verdict, ...]:
    """Each verdict as it was revised and closed in the end."""
    return tuple(state.verdict for state in reduce(fold, verdicts, RunState()).verdicts.values())
