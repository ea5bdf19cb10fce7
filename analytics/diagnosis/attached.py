"""A training that was not ours, diagnosed by the rules that watched it (loop/attached_rules.py) and today's thresholds."""

from __future__ import annotations

from unskew.analytics.core.outcome import Findings, Sight
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
        state, events = rules.committed(state, released)
        made += events
    for lost in (loss_of(log, event) for event in log.lost):
        state, events = rules.lost(state, Suspect.of(lost), lost.iteration or 0)
        made += events
    fitted, logged = state.monitor.fitted, state.limit.logged
    sight = TOO_SHORT
    if logged is not None:
        sight = Sight(scope="device", smallest_slowdown=logged.smallest_slowdown, why=logged.why)
    verdicts = settled(event for event in made if isinstance(event, Verdict | VerdictClosed))
    findings = Findings(verdicts=verdicts, sight=sight)
    return FailSlowResult(findings, fitted.model if fitted else None, state.monitor.retraining.seen)
