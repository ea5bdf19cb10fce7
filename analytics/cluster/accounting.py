"""Where the time went: seconds of the whole job by cause, adding up to the whole.

* useful: what the committed micro-batches would have taken on the whole, healthy job;
* capacity: what dead and slow devices take away, less what a plan with smaller bubbles than the first wins back;
* imbalance: what the plan leaves of the surviving capacity;
* detection, reconfigure, restart, stall, checkpoint: standstill, and why;
* redo: work that was thrown away, at a failure or since the last checkpoint;
* stopped: the job had ended;
* unexplained: the whole minus all these (the noise of iterations, mostly).
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Lost = Literal["capacity", "imbalance", "detection", "reconfigure", "restart", "stall", "checkpoint", "redo", "stopped"]
LOST: tuple[Lost, ...] = get_args(Lost)


class Account(msgspec.Struct):
    """Seconds by cause. `since_save` is what a return to the last checkpoint would throw away."""

    useful_s: float = 0.0
    lost_s: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(LOST, 0.0))
    since_save: dict[str, float] = msgspec.field(default_factory=dict)

    def work(self, seconds: float, rate: float, capacity: float) -> None:
        """`seconds` of training at `rate` (1.0 = fault-free) while `capacity` of the job's devices is left."""
        imbalance = max(0.0, capacity - rate)
        for cause, share in (("useful", rate), ("imbalance", imbalance), ("capacity", 1.0 - rate - imbalance)):
            self.since_save[cause] = self.since_save.get(cause, 0.0) + seconds * share

    def lose(self, cause: Lost, seconds: float) -> None:
        self.lost_s[cause] += seconds

    def save(self, *, in_progress_s: float = 0.0) -> None:
        """The work so far can no longer be lost, but for the useful part of an iteration that has only begun."""
        self.useful_s += self.since_save.pop("useful", 0.0) - in_progress_s
        for cause, seconds in self.since_save.items():
            self.lost_s[cause] += seconds
        self.since_save = {"useful": in_progress_s}

    def fall_back(self) -> None:
        """Return to the last checkpoint."""
        self.lost_s["redo"] += sum(self.since_save.values())
        self.since_save = {}
