"""What a rank is doing right now: written by its main thread, sent to the agent by its heartbeat thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from unskew.analytics.health.liveness import Activity

LONGEST_WAIT = timedelta(hours=1)
"""Of communication. Who is stuck is for liveness to say, not for a timeout: this only bounds a wait nobody ends."""


class RankProgress:
    """A counter that moves with every step of work, the present activity, and whom it waits for (None = nobody, or all)."""

    def __init__(self) -> None:
        self.count = 0
        self.iteration = 0
        self.activity: Activity = "idle"
        self.waits_for: int | None = None
        self.promised_s = 0.0

    def working(self) -> None:
        """The rank begins work of its own: if nothing moves from here on, it is the culprit."""
        self.count += 1
        self.activity, self.waits_for = "compute", None

    @contextmanager
    def promising(self, seconds: float) -> Iterator[None]:
        """A long phase of work (a compilation, a checkpoint, an evaluation): nobody calls it hung for so many seconds."""
        self.promised_s = seconds
        self.working()
        try:
            yield
        finally:
            self.promised_s = 0.0
            self.working()

    @contextmanager
    def waiting(self, activity: Activity, peer: int | None = None) -> Iterator[None]:
        """The rank waits for others: if nothing moves from here on, it is a victim."""
        self.count += 1
        self.activity, self.waits_for = activity, peer
        yield
        self.working()
