"""A training that was not ours, diagnosed by the rules that watched it (loop/attached_rules.py) and today's thresholds."""

from __future__ import annotations

from unskew.analytics.core.outcome import Findings, closest
from unskew.analytics.detector.options import options_for
from unskew.analytics.diagnosis.failslow import TOO_SHORT, FailSlowResult, loss_of, settled
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.loop import attached_rules as rules
from unskew.collector.events import DetectionLimit, Event, Verdict, VerdictClosed


def follow_attached(log: RunLog) -> FailSlowResult:
    """Its iterations again, one by one, then its losses: after the first of these nobody trains on."""
    blind = (event for event in log.control if isinstance(event, DetectionLimit) and event.at_iteration == 0)
    why_not = next((event.why for event in blind), "")
    state, _ = rules.begin(log.plans[0], why_not, options_for(log.device_kind))
    made: list[Event] = []
    for released in log.released:
        version = released.committed.plan_version
        if version != state.plan.plan_version and version in log.plans:
            state, _ = rules.applied(state, log.plans[version], released.committed.iteration)
        state, events = rules.committed(state, released)
        made += events
    for lost in (loss_of(log, event) for event in log.lost):
        state, events = rules.lost(state, Suspect.of(lost), lost.iteration or 0)
        made += events
    verdicts = settled(event for event in made if isinstance(event, Verdict | VerdictClosed))
    monitor = state.monitor
    if monitor.fitted is None:
        return FailSlowResult(Findings(verdicts=verdicts, sight=closest(state.sights) if why_not else TOO_SHORT), None)
    of_device, of_job = closest([one for one in state.sights if one.scope != "job"]), state.sights[-1]
    findings = Findings(verdicts=verdicts, sight=of_device, of_job=of_job, long_ones=monitor.unexplained)
    return FailSlowResult(findings, monitor.fitted.model, monitor.retraining.seen)
