"""The Detector over a finished log: the code that runs live, fed with what the log holds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import msgspec
import numpy as np

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.outcome import Findings, Sight
from unskew.analytics.core.run_state import RunState, fold
from unskew.analytics.detector.detector import Detector, sight_of
from unskew.analytics.detector.options import DetectorOptions, options_for
from unskew.analytics.detector.peer_groups import UnitRoles, equal_roles
from unskew.analytics.detector.residuals import UnitTimes
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.predictor.retraining import IterationSample, Retraining
from unskew.collector.events import DeviceLost, Verdict, VerdictClosed

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


def follow_run(log: RunLog) -> FailSlowResult:
    """One of our own runs again, iteration by iteration: predictors learned on the way, losses where the run saw them."""
    monitor = Monitor(options=options_for(log.device_kind), retraining=Retraining(classes=log.classes))
    verdicts: list[Verdict | VerdictClosed] = []
    seen: list[IterationSample] = []
    losses = sorted(log.lost, key=lambda lost: lost.watermark or 0)
    plan_version = 0
    for released in log.released:
        committed = released.committed
        monitor = monitor.reading(released.gpus)
        while losses and (losses[0].watermark or 0) <= committed.iteration:
            monitor, found = monitor.lost(*loss_of(log, losses.pop(0), committed.iteration))
            verdicts += found
        if committed.plan_version != plan_version:
            plan_version = committed.plan_version
            monitor = monitor.plan_changed(committed.iteration)
        if committed.log_complete:
            monitor, judged = monitor.judge(released, log.plans[committed.plan_version])
            # Shared cores make iterations longer and not chunks, and nothing here knows of them: chunks alone show drift.
            seen.append(msgspec.structs.replace(judged.sample, predicted_us=None))
            monitor, _ = monitor.learn(seen[-1], judged.verdicts)
            verdicts += judged.verdicts
    last = log.released[-1].committed.iteration if log.released else 0
    for lost in losses:
        monitor, found = monitor.lost(*loss_of(log, lost, last))
        verdicts += found
    fitted = monitor.fitted
    sight = sight_of(monitor.detector, monitor.options) if fitted else TOO_SHORT
    return FailSlowResult(Findings(verdicts=settled(verdicts), sight=sight), fitted.model if fitted else None, tuple(seen))


def loss_of(log: RunLog, lost: DeviceLost, iteration: int) -> tuple[Suspect, int]:
    """As the run saw it; in logs of old versions, which do not record it, `iteration` and all that had a role beside it
    count."""
    with_it = [plan for plan in log.plans.values() if lost.rank in plan.ranks]
    others = tuple(rank for rank in with_it[-1].ranks if rank != lost.rank) if with_it else ()
    suspect = Suspect(rank=lost.rank, how=lost.how, detail=lost.detail, victims=lost.victims or others)
    return suspect, iteration if lost.iteration is None else lost.iteration


def follow_section(section: TraceSection, options: DetectorOptions) -> Findings:
    """A recording whose workload was inferred: every chunk against what its peers let expect."""
    detector, operations, roles = Detector(options), section.recording.graph.operations, _roles(section)
    cells = [(kind, i) for (kind, _), members in section.cells.items() for i in members]
    chunks = [i for _, i in cells]
    rank = np.array([operations[i].rank for i in chunks])
    kind = np.array([section.kinds.index(name) for name, _ in cells])
    verdicts: list[Verdict | VerdictClosed] = []
    for column, iteration in enumerate(section.recording.iterations):
        us, expected_us = section.parts.work_us[chunks, column], section.expected_us[chunks, column]
        verdicts += detector.observe_units(iteration, UnitTimes(section.kinds, rank, kind, us, expected_us), roles)
    return Findings(verdicts=settled(verdicts), sight=sight_of(detector.state, options))


def as_slow(section: TraceSection, verdicts: Iterable[Verdict]) -> TraceSection:
    """The section in which ranks and replicas that were named are expected to take what they would at their healthy speed. Of
    one stage, where forward and backward explain each other, that is what the others take in the same iteration."""
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


def _roles(section: TraceSection) -> UnitRoles:
    """Peers are the ranks of a stage, pipeline peers those of a replica."""
    replicas: dict[int, set[int]] = {}
    for operation in section.recording.graph.operations:
        replicas.setdefault(operation.replica, set()).add(operation.rank)
    stage_of = {operation.rank: operation.stage for operation in section.recording.graph.operations}
    return equal_roles(stage_of, tuple(tuple(sorted(ranks)) for _, ranks in sorted(replicas.items())))


def settled(verdicts: Iterable[Verdict | VerdictClosed]) -> tuple[Verdict, ...]:
    """Each verdict as it was revised and closed in the end."""
    return tuple(state.verdict for state in reduce(fold, verdicts, RunState()).verdicts.values())
