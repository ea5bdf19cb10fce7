"""Verdicts that no injected fault can prove or refute, scored by what came later.

* slow_device: over the next iterations (`OVER`, fewer when it is closed or the run ends before; at least `LEAST`) the kinds of
  work that were named, against their prediction and over what the other ranks took of theirs. Right iff the median excess (log)
  is at least half of the claimed one: a mere spike is back at 1.0 by then. Iterations that led to the verdict do not count;
* dead: its process has ended, that was the evidence.

A hung or frozen rank is ended by the controller, so nothing later can speak for or against: such a verdict stays unscored.
"""

from __future__ import annotations

from math import exp, log
from statistics import fmean, median

import msgspec

from unskew.collector.events import IterationJudged, RankRatio, Verdict, VerdictScored

OVER = 20
LEAST = 8
ENOUGH = 0.5


class Hindsight(msgspec.Struct, frozen=True):
    """A slow_device verdict under observation; `excess` per later iteration, as a log."""

    verdict: Verdict
    excess: tuple[float, ...] = ()

    @property
    def complete(self) -> bool:
        return len(self.excess) >= OVER

    def add(self, judged: IterationJudged) -> Hindsight:
        """With one more iteration, when it lies behind the verdict and has the rank and another."""
        rank = self.verdict.culprits[0].rank
        if judged.iteration <= self.verdict.at_iteration:
            return self
        own = next((_level(one, self.verdict) for one in judged.ranks if one.rank == rank), None)
        others = [level for one in judged.ranks if one.rank != rank and (level := _level(one, self.verdict)) is not None]
        if own is None or not others:
            return self
        return Hindsight(self.verdict, (*self.excess, own - median(others)))

    def score(self) -> VerdictScored | None:
        """What the later iterations say; None when they are too few."""
        if len(self.excess) < LEAST:
            return None
        claimed = -fmean(log(speed) for speed in self.verdict.speed.values())
        later = median(self.excess)
        correct = later >= ENOUGH * claimed
        told = f"later evidence: {exp(later):.2f} times as long as the others in {len(self.excess)} iterations"
        return VerdictScored(
            verdict=self.verdict.verdict,
            correct=correct,
            truth=told if correct else None,
            delay_iterations=None,
            onset_error_iterations=None,
            speed_error=abs(exp(-claimed) - exp(-later)),
            by="later",
        )


def seen_dead(verdict: Verdict) -> VerdictScored:
    """The score of a death that nobody injected."""
    return VerdictScored(
        verdict=verdict.verdict,
        correct=True,
        truth="later evidence: its process has ended",
        delay_iterations=None,
        onset_error_iterations=None,
        speed_error=None,
        by="later",
    )


def _level(one: RankRatio, verdict: Verdict) -> float | None:
    """Mean log of measured over predicted of the named kinds; None when the rank executed none of them."""
    by_kind = {"F": one.f, "B": one.b, "W": one.w}
    logs = [log(ratio) for kind in verdict.speed if (ratio := by_kind.get(kind)) is not None and ratio > 0]
    return fmean(logs) if logs else None
