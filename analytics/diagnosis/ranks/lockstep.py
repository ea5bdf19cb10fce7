"""Whether ranks wait for each other within what was timed: then a slow rank is in everybody's times, and its victims look slow.

A collective in every step keeps ranks in step: nobody gets ahead by as much as a step, and who begins a piece of work late ends
it with the others. That ranks are independent therefore has to be seen:

* with start times: they drift apart by more than a step, little by little: a step that moves one by more than a step beyond
  what the durations say is a clock that was set, or a pause;
* with durations only, of three or more ranks: sums drift apart by more than a step, and the times do not rise and fall
  together, neither on all ranks but one (a step may be timed without the part in which one rank is slow: then all others wait
  alike, within it) nor, much alike, on any two, nor with a rank whose steps are nearly always the longest (all others may be
  timed without their input, each its own).
"""

from __future__ import annotations

import numpy as np
import polars as pl

from unskew.analytics.detector.residuals import Floats

MOST_ALIKE, TWO_ALIKE = 0.5, 0.9
"""Changes of independent ranks are correlated less than this: those of all but one, and those of any two."""
MOST_LONGEST, LEAST_ALIKE = 0.9, 2.0
"""A rank whose steps are the longest so often holds all others' in its own, if each goes with it by so many standard errors."""
ENDS_TOGETHER = 0.25
"""Ends that differ by no more than this part of what durations differ by are the same end."""
LEAST_DIFFERENCE = 0.05
"""Durations that differ by less than this part of themselves accuse nobody."""


def why_in_step(us: Floats, start_us: Floats | None = None) -> str:
    """Why steps `us` [iteration, rank] cannot be compared between ranks; "" when the ranks are seen to be independent."""
    n_ranks = us.shape[1]
    step_us, ahead_us = float(np.median(us)), us - np.median(us, axis=1, keepdims=True)
    if start_us is not None:
        moved = np.diff(start_us - np.median(start_us, axis=1, keepdims=True), axis=0)
        moved[np.abs(moved - ahead_us[:-1]) > step_us] = 0.0
        in_step = "the ranks stay in step, so they wait for each other, and a slow rank is in everybody's step times"
        return "" if _drift(moved) > step_us else in_step
    if n_ranks < 3:
        return "of two ranks' step times alone nobody can tell who is slow from who waits"
    if _drift(ahead_us) <= step_us:
        return "the ranks' step times add up to the same, so they wait for each other, and a slow rank is in everybody's"
    alike = correlated(us)
    pairs = np.sort(alike[np.triu_indices(n_ranks, 1)])[::-1]
    most = pairs[(n_ranks - 1) * (n_ranks - 2) // 2 - 1] >= MOST_ALIKE
    who = "all ranks but one" if most else "some ranks"
    together = f"the step times of {who} rise and fall together, so the ranks wait for each other"
    longest = int(np.bincount(np.argmax(us, axis=1)).argmax())
    holds_all = np.mean(us[:, longest] >= us.max(axis=1)) >= MOST_LONGEST
    if holds_all and np.delete(alike[longest], longest).min() >= LEAST_ALIKE / np.sqrt(len(us)):
        return f"all step times lie within those of rank {longest} and follow them, so the ranks wait for each other"
    return together if most or pairs[0] >= TWO_ALIKE else ""


def _drift(moved_us: Floats) -> float:
    """How far a rank gets from the others, at most."""
    return float(np.ptp(np.cumsum(moved_us, axis=0), axis=0).max())


def correlated(us: Floats) -> Floats:
    """[rank, rank] Spearman's, of the changes of each two ranks' times; 0 with a rank that never changes.

    Of n ranks all but one make (n - 1)(n - 2) / 2 pairs.
    """
    changes = pl.from_numpy(np.diff(np.log(us), axis=0)).select(pl.all().fill_nan(None).rank()).to_numpy()
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nan_to_num(np.corrcoef(changes, rowvar=False)))


def end_together(us: Floats, start_us: Floats) -> bool:
    """Whether who begins this piece of work later takes as much less for it: `us` and `start_us` [iteration, rank]. Then what
    it took holds the wait for the others."""
    took, begun = (np.median(x - np.median(x, axis=1, keepdims=True), axis=0) for x in (us, start_us))
    most = np.abs(took).max()
    return bool(most >= LEAST_DIFFERENCE * np.median(us) and np.abs(took + begun).max() <= ENDS_TOGETHER * most)
