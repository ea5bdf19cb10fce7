"""The timeouts of a run, from the quickest to the slowest; `analytics/health/timeouts.py` gives the reason why they must
climb."""

from __future__ import annotations

from unskew.analytics.health.liveness import LivenessOptions
from unskew.analytics.health.timeouts import Timeout
from unskew.runtime.control.watch import STANDSTILL_S
from unskew.runtime.heartbeat_page import BEAT_S
from unskew.runtime.node.heartbeats import STATUS_S
from unskew.runtime.rank.progress import LONGEST_WAIT


def ladder(options: LivenessOptions) -> tuple[Timeout, ...]:
    """Every rung of a run."""
    return (
        Timeout("the heartbeats' period", BEAT_S),
        Timeout("the agent's status", STATUS_S),
        Timeout("stopped_s", options.stopped_s, factor=2),
        Timeout("frozen_s", options.frozen_s, factor=3),
        Timeout("hung_floor_s", options.hung_floor_s),
        Timeout("hung_s before chunk times are known", options.hung_s, factor=2),
        Timeout("start_s", options.start_s),
        Timeout("a standstill that nobody can be named for", STANDSTILL_S),
        Timeout("communication's own timeout", LONGEST_WAIT.total_seconds(), factor=10),
    )
