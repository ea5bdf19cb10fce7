"""The timeouts of a run, from the quickest to the slowest; `analytics/ladder.py` says why they must climb."""

from __future__ import annotations

from unskew.analytics.ladder import Rung
from unskew.analytics.liveness import LivenessOptions
from unskew.runtime.comm import WAIT
from unskew.runtime.control import BEAT_S
from unskew.runtime.pulse import PULSE_S
from unskew.runtime.watch import STANDSTILL_S


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
