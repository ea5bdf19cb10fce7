"""Verdicts scored: against injected truth (scoring.py), or, where no fault can prove or refute them, by what came later.

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

from unskew.analytics.core.outcome import times_as_long
from unskew.analytics.loop.scoring import score_verdict
from unskew.collector.events import Control, FaultInjected, IterationJudged, RankRatio, Verdict, VerdictScored

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
        """What the later iterations show; None when they are too few."""
        if len(self.excess) < LEAST:
            return None
        claimed = -fmean(log(speed) for speed in self.verdict.speed.values())
        later = median(self.excess)
        correct = later >= ENOUGH * claimed
        evidence = f"later evidence: {times_as_long(exp(later))} as the others in {len(self.excess)} iterations"
        return VerdictScored(
            verdict=self.verdict.verdict,
            correct=correct,
            truth=evidence if correct else None,
            delay_iterations=None,
            onset_error_iterations=None,
            speed_error=abs(exp(-claimed) - exp(-later)),
            by="later",
        )


class VerdictScoring(msgspec.Struct, frozen=True, kw_only=True):
    """The faults announced so far, and the verdicts under observation, by number; `truth_known` as in `Site`."""

    truth_known: bool
    faults: tuple[FaultInjected, ...] = ()
    watched: dict[int, Hindsight] = {}

    def injected(self, fault: FaultInjected) -> VerdictScoring:
        """With one more fault."""
        return msgspec.structs.replace(self, faults=(*self.faults, fault))

    def named(self, verdict: Verdict) -> tuple[VerdictScoring, list[Control]]:
        """Score a new verdict; what no injected fault tells of is watched."""
        scored = score_verdict(verdict, self.faults, truth_known=self.truth_known)
        if scored is not None:
            return self, [scored]
        if verdict.cause == "slow_device":
            return msgspec.structs.replace(self, watched={**self.watched, verdict.verdict: Hindsight(verdict)}), []
        return self, [seen_dead(verdict)] if verdict.cause == "dead" else []

    def observed(self, judged: IterationJudged) -> tuple[VerdictScoring, list[Control]]:
        """One more iteration; verdicts that have been watched long enough are scored."""
        watched = {number: one.add(judged) for number, one in self.watched.items()}
        complete = [number for number, one in watched.items() if one.complete]
        return msgspec.structs.replace(self, watched=watched).ended(*complete)

    def ended(self, *numbers: int) -> tuple[VerdictScoring, list[Control]]:
        """Nothing more comes of these verdicts: score those that were watched, where that suffices."""
        scores = [self.watched[number].score() for number in numbers if number in self.watched]
        left = {number: one for number, one in self.watched.items() if number not in numbers}
        return msgspec.structs.replace(self, watched=left), [scored for scored in scores if scored is not None]


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
