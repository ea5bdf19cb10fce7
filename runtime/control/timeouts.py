"""The timeouts of a run, from the quickest to the slowest; `analytics/health/timeouts.py` says why they must climb."""

from __future__ import annotations

from unskew.analytics.health.liveness import LivenessOptions
from unskew.analytics.health.timeouts import Rung
from unskew.runtime.control.watch import STANDSTILL_S
from unskew.runtime.node.heartbeats import PULSE_S
from unskew.runtime.rank.comm import WAIT
from unskew.runtime.rank.control_thread import BEAT_S


def ladder(options: LivenessOptions) -> tuple[Rung, ...]:
    """Every rung of a run."""
    return (
        Rung("the heartbeats' period", BEAT_S),
        Rung("the agent's pulse", PULSE_S),
        Rung("stopped_s", options.stopped_s, factor=2),
        Rung("frozen_s", options.frozen_s, factor=3),
        Rung("hung_floor_s", options.hung_floor_s),
        Rung("hung_s before chunk times are known", options.hung_s, factor=2),
        Rung("start_s", options.start_s),
        Rung("a standstill that nobody can be named for", STANDSTILL_S),
        Rung("communication's own timeout", WAIT.total_seconds(), factor=10),
    )
