"""Whether ranks wait for each other within what was timed: then a slow rank is in everybody's times, and its victims look slow.

A collective in every step keeps ranks in step: nobody gets ahead by as much as a step, and who begins a piece of work late ends
it with the others. That ranks are independent therefore has to be seen:

* with start times: they drift apart by more than a step;
* with durations only, of three or more ranks: sums drift apart by more than a step, and the times do not rise and fall together
  on all ranks but one (a step may be timed without the part in which one rank is slow: then all others wait alike, within it).
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from scipy.stats import spearmanr

from unskew.analytics.detector.residuals import Floats

MOST_ALIKE = 0.5
"""Independent ranks' changes are correlated less than this."""
ENDS_TOGETHER = 0.25
"""Ends that differ by no more than this part of what durations differ by are the same end."""
LEAST_DIFFERENCE = 0.05
"""Durations that differ by less than this part of themselves accuse nobody."""


def why_in_step(us: Floats, start_us: Floats | None = None) -> str:
    """Why steps `us` [iteration, rank] cannot be compared between ranks; "" when the ranks are seen to be independent."""
    n_ranks = us.shape[1]
    step_us = float(np.median(us))
    if start_us is not None:
        begun = start_us - np.median(start_us, axis=1, keepdims=True)
        if np.ptp(begun, axis=0).max() > step_us:
            return ""
        return "the ranks stay in step, so they wait for each other, and a slow rank is in everybody's step times"
    if n_ranks < 3:
        return "of two ranks' step times alone nobody can tell who is slow from who waits"
    behind = np.cumsum(us - np.median(us, axis=1, keepdims=True), axis=0)
    if np.ptp(behind, axis=0).max() <= step_us:
        return "the ranks' step times add up to the same, so they wait for each other, and a slow rank is in everybody's"
    if alike(us) >= MOST_ALIKE:
        return "the step times of all ranks but one rise and fall together, so the ranks wait for each other"
    return ""


def alike(us: Floats) -> float:
    """The least correlation (Spearman) among the changes of all ranks but one: of n ranks' pairs the (n - 1)(n - 2) / 2 most
    alike."""
    changes = np.diff(np.log(us), axis=0)
    n_ranks = us.shape[1]
    found: list[float] = sorted(
        (_correlation(changes[:, a], changes[:, b]) for a, b in combinations(range(n_ranks), 2)), reverse=True
    )
    return float(found[(n_ranks - 1) * (n_ranks - 2) // 2 - 1])


def _correlation(a: Floats, b: Floats) -> float:
    """Of two series of which one never changes: 0."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(spearmanr(a, b).statistic)


def end_together(us: Floats, start_us: Floats) -> bool:
    """Whether who begins this piece of work later takes as much less for it: `us` and `start_us` [iteration, rank]. Then what
    it took holds the wait for the others."""
    took, begun = (np.median(x - np.median(x, axis=1, keepdims=True), axis=0) for x in (us, start_us))
    most = np.abs(took).max()
    return bool(most >= LEAST_DIFFERENCE * np.median(us) and np.abs(took + begun).max() <= ENDS_TOGETHER * most)
