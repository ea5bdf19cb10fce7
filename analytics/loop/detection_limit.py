"""What the Detector of a live run would name from now on, logged when it changed: so that calm can be read from the log."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.outcome import Sight
from unskew.collector.events import DetectionLimit

PATIENCE = 5
"""So many iterations in a row that could not be judged are no accident."""
LEAST_CHANGE = 0.25
"""By this part of what it adds to the healthy time the smallest slowdown has to change to be news."""


class LimitState(msgspec.Struct, frozen=True):
    """What was logged last (None in warm-up), and how many iterations in a row have not been judged since."""

    logged: DetectionLimit | None = None
    unjudged: int = 0

    def judged(self, sight: Sight, iteration: int) -> tuple[LimitState, list[DetectionLimit]]:
        """An iteration was judged, and `sight` is what would have been named."""
        state = msgspec.structs.replace(self, unjudged=0)
        before = None if self.logged is None else self.logged.smallest_slowdown
        now = sight.smallest_slowdown
        if now is None and before is None:
            return state, []
        if now is not None and before is not None and abs(now - before) <= LEAST_CHANGE * (before - 1.0):
            return state, []
        return state._log(DetectionLimit(at_iteration=iteration, smallest_slowdown=now, why=sight.why))

    def passed_over(self, iteration: int) -> tuple[LimitState, list[DetectionLimit]]:
        """The log of an iteration was not complete: nobody was judged by it."""
        state = msgspec.structs.replace(self, unjudged=self.unjudged + 1)
        if state.unjudged != PATIENCE or self.logged is None:
            return state, []
        why = f"the log of the last {PATIENCE} iterations came too late or not at all"
        return state._log(DetectionLimit(at_iteration=iteration, smallest_slowdown=None, why=why))

    def _log(self, limit: DetectionLimit) -> tuple[LimitState, list[DetectionLimit]]:
        return msgspec.structs.replace(self, logged=limit), [limit]
