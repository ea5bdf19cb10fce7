"""A training that was not ours, diagnosed by the rules that watched it (loop/watched/) and today's thresholds."""

from __future__ import annotations

from unskew.analytics.core.outcome import Findings, closest
from unskew.analytics.detector.options import options_for
from unskew.analytics.diagnosis.failslow import TOO_SHORT, FailSlowResult, followed, loss_of, settled
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.replay.watched import WatchedRehearsal
from unskew.collector.events import DeviceLost, Verdict, VerdictClosed


def follow_attached(log: RunLog) -> FailSlowResult:
    """Its iterations again, one by one, with what befell its ranks where it did."""
    control = [loss_of(log, event) if isinstance(event, DeviceLost) else event for event in log.control]
    options = options_for(log.device_kind)
    rehearsal = WatchedRehearsal(control, log.released, log.plans, options, can_be_probed=log.can_be_probed)
    seen, state = followed(rehearsal), rehearsal.state
    verdicts = settled(event for event in rehearsal.made if isinstance(event, Verdict | VerdictClosed))
    monitor = state.monitor
    if monitor.fitted is None:
        sight = closest(state.sights) if state.why_not else TOO_SHORT
        return FailSlowResult(Findings(verdicts=verdicts, sight=sight), None, seen)
    of_device, of_job = closest([one for one in state.sights if one.scope != "job"]), state.sights[-1]
    findings = Findings(verdicts=verdicts, sight=of_device, of_job=of_job, long_ones=monitor.unexplained)
    return FailSlowResult(findings, monitor.fitted.model, seen)
