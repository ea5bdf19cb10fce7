"""The training itself in a simulated job: iterations in a row, what they have reached, checkpoints and what is thrown away."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from unskew.analytics.cluster.accounting import Account
from unskew.analytics.cluster.job import Job
from unskew.analytics.cluster.timing import fault_free_s
from unskew.analytics.core.layout import Layout
from unskew.analytics.lab.simulator.outcome import IterationSegment


class TrainingProgress:
    """`iteration`, `tokens`: reached so far; `begun`: the share of the next iteration that is done; `segments`: what counts."""

    def __init__(self, job: Job, account: Account, noise: np.random.Generator, noise_cv: float) -> None:
        self.job, self.account = job, account
        self.ideal_s = fault_free_s(job)
        self.iteration, self.tokens, self.begun = 0, 0.0, 0.0
        self.segments: list[IterationSegment] = []
        self._noise, self._noise_cv = noise, noise_cv
        self._saved_iteration, self._saved_tokens = 0, 0.0

    def train(
        self, now_s: float, span_s: float, layout: Layout, *, plan_version: int, expected_s: float, capacity: float
    ) -> None:
        """`span_s` seconds of iterations that take `expected_s` each but for noise, the last of them perhaps unfinished.

        The account gets iterations at their expected time: what the noise did to the clock stays unexplained.
        """
        count = int(span_s / expected_s) + 4
        count += int(8 * self._noise_cv * count**0.5)
        seconds = np.full(count, expected_s)
        if self._noise_cv:
            seconds *= np.maximum(0.5, 1.0 + self._noise.standard_normal(count) * self._noise_cv)
        ends = np.cumsum(seconds) - self.begun * seconds[0]
        done = int(np.searchsorted(ends, span_s, side="right"))
        if done:
            starts = now_s + np.concatenate([[ends[0] - seconds[0]], ends[: done - 1]])
            self.segments.append(
                IterationSegment(plan_version, layout.micro_batches, self.iteration, starts, seconds[:done], expected_s)
            )
        begun = float((span_s - ends[done - 1]) / seconds[done] if done else self.begun + span_s / seconds[0])
        share = layout.micro_batches / self.job.micro_batches
        self.account.work((done + begun - self.begun) * expected_s, share * self.ideal_s / expected_s, capacity)
        self.begun = min(begun, 1.0)
        self.iteration += done
        self.tokens += done * share * self.job.tokens

    def save(self, layout: Layout) -> None:
        """A checkpoint: nothing before it can be lost."""
        self.account.save(in_progress_s=self._in_progress_s(layout))
        self._saved_iteration, self._saved_tokens = self.iteration, self.tokens

    def fall_back(self) -> None:
        """Return to the last checkpoint."""
        self.account.fall_back()
        self.iteration, self.tokens, self.begun = self._saved_iteration, self._saved_tokens, 0.0
        self.segments = _until(self.segments, self.iteration)

    def redo(self, layout: Layout) -> None:
        """What is done of the present iteration is thrown away."""
        whole_s = self._in_progress_s(layout)
        self.account.since_save["useful"] = self.account.since_save.get("useful", 0.0) - whole_s
        self.account.lose("redo", whole_s)
        self.begun = 0.0

    def _in_progress_s(self, layout: Layout) -> float:
        """What of `useful` belongs to the iteration that has begun."""
        return self.ideal_s * layout.micro_batches / self.job.micro_batches * self.begun


def _until(segments: Sequence[IterationSegment], iteration: int) -> list[IterationSegment]:
    """The segments without iterations from `iteration` on."""
    kept = []
    for part in segments:
        n = min(len(part.seconds), iteration - part.first_iteration)
        if n > 0:
            kept.append(msgspec.structs.replace(part, start_s=part.start_s[:n], seconds=part.seconds[:n]))
    return kept
