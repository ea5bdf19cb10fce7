"""Was a stretch that was named in a recorded series slow, and is it a phase of its own? Tests that know no detector.

It was slow where `PERSISTS` of its iterations or more took longer than `USUAL` of the `AROUND` before, and of those after it:
spikes among usual iterations are not. One that was slow may still be what the series does by itself now and then, or its
work's: a false alarm too.

How far a stretch stands out: the log of the median of its n iterations, less that of the `AROUND` before or after it,
whichever is more. It is a phase of its own where all of these hold:

1. size: it takes at least `LEAST` times as long as either side;
2. chance: of `SURROGATES` series as long, made of blocks of the noise of its own series, none has a stretch of n iterations
   anywhere that stands out so far. The noise is all the rest of the series, bursts and spikes with it, less what is slower
   than `SLOW_DRIFT` stretches; a block is as long as it remembers (`memory_of`);
3. work: in no twin, another recording of the same work, do the same steps stand out half as far. What two machines do at the
   same steps is asked for by the job (data, an evaluation, a checkpoint).

Of several stretches of a series the one that stands out farthest is asked about first: one that is a phase is no noise for the
next (an iterative scan: Zhang, Assuncao and Kulldorff 2010). Noise chosen for being the highest of its series passes the
second question once in `SURROGATES` series. Worked example: five iterations of 1.5 s in a row among 2,000 of 1 s, of which one
in forty, alone, takes 2 s: no surrogate has three long ones in five (size and chance hold); where stalls of five come again
and again unnamed, the noise remembers five, and most surrogates have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log10, sqrt

import msgspec
import numpy as np
from scipy.ndimage import median_filter, rank_filter
from scipy.stats import rankdata
from support.traces.noisy_series import STARTED, Floats, Recorded

AROUND, LEAST_AROUND = 30, 12
LEAST = 1.05
SLOW_DRIFT, LEAST_WINDOW = 4, 101
LEAST_REST = 60
SURROGATES = 1_999
HALF = 0.5
USUAL, PERSISTS = 0.95, 0.75


class Phase(msgspec.Struct, frozen=True):
    """Iterations [since, until) of a series, by their places; `slow`: whether they were; `why` they are no phase of their own,
    "" = they are one. `over`: how many times as long they take as the slower side."""

    series: str
    since: int
    until: int
    over: float
    slow: bool
    why: str

    def __str__(self) -> str:
        place = f"{self.series[:40]} {self.since} to {self.until}, x{self.over:.2f}"
        return f"{place} ({self.why})" if self.why else place


def judged(series: Recorded, stretches: Sequence[tuple[int, int]], all_series: Sequence[Recorded], seed: int) -> list[Phase]:
    """The questions above about each stretch, in the order of time."""
    logs = np.log(series.times)
    twins = [one for one in all_series if one.work == series.work and one.name != series.name]
    found: list[Phase] = []
    for since, until in sorted(stretches, key=lambda one: -excess(logs, *one)):
        over, random = excess(logs, since, until), np.random.default_rng([seed, since, until])
        shared = [shift for one in twins if (shift := _in_twin(one, series.steps[since], series.steps[until - 1])) is not None]
        why = ""
        if over < log(LEAST):
            why = f"less than {LEAST:g} times a side"
        elif shared and max(shared) >= HALF * over:
            why = f"its twin has it too, x{exp(max(shared)):.2f}"
        elif not rare(logs, since, until, [(one.since, one.until) for one in found if not one.why], random):
            why = "the noise of the series does that by itself"
        found.append(Phase(series.name, since, until, exp(over), is_slow(logs, since, until), why))
    return sorted(found, key=lambda one: one.since)


def excess(logs: Floats, since: int, until: int) -> float:
    """By how much, over the higher of its sides; -inf where there is none to compare with."""
    before, after = logs[max(since - AROUND, 0) : since], logs[until : until + AROUND]
    sides = [float(np.median(side)) for side in (before, after) if len(side) >= LEAST_AROUND]
    return float(np.median(logs[since:until])) - max(sides) if sides and since < until else -np.inf


def is_slow(logs: Floats, since: int, until: int) -> bool:
    """Whether most of its iterations, one by one, are longer than the usual ones of both sides."""
    sides = [side for side in (logs[max(since - AROUND, 0) : since], logs[until : until + AROUND]) if len(side) >= LEAST_AROUND]
    line = max((float(np.quantile(side, USUAL)) for side in sides), default=np.inf)
    return bool((logs[since:until] > line).mean() >= PERSISTS)


def _sides(n: int, since: int, until: int) -> tuple[bool, bool]:
    return since >= LEAST_AROUND, n - until >= LEAST_AROUND


def _in_twin(twin: Recorded, first: int, last: int) -> float | None:
    """How far the same steps stand out there; None where it has not recorded them and both their sides."""
    since, until = (int(at) for at in np.searchsorted(twin.steps, (first, last + 1)))
    if until <= since or not all(_sides(len(twin.times), since, until)):
        return None
    return excess(np.log(twin.times), since, until)


def rare(logs: Floats, since: int, until: int, phases: Sequence[tuple[int, int]], random: np.random.Generator) -> bool:
    """Whether no series made of blocks of the noise, all but this stretch and the `phases`, has one as long that stands out so
    far."""
    n, over, sides = until - since, excess(logs, since, until), _sides(len(logs), since, until)
    noise = np.arange(len(logs)) >= min(STARTED, since)
    for begin, end in ((since, until), *phases):
        noise[begin:end] = False
    rest = logs[noise]
    if len(rest) < LEAST_REST:
        return False
    window = min(max(2 * SLOW_DRIFT * n + 1, LEAST_WINDOW), len(rest))
    rest = rest - median_filter(rest, window, mode="nearest")
    block = memory_of(rest)
    for _ in range(SURROGATES):
        starts = random.integers(0, len(rest) - block + 1, len(logs) // block + 1)
        made = rest[(starts[:, None] + np.arange(block)).ravel()[: len(logs)]]
        if _highest(made, n, sides) >= over:
            return False
    return True


def memory_of(noise: Floats) -> int:
    """How long blocks have to be (Politis and White 2004): twice the lag behind which a handful of autocorrelations in a row
    are as near to none as chance leaves them; of the values or of their ranks, whichever remember longer. A third of the
    series at most."""
    n = len(noise)
    in_a_row, most, near = max(5, round(sqrt(log10(n)))), n // 6, 2 * sqrt(log10(n) / n)
    lags = []
    for series in (noise, rankdata(noise)):
        away = series - series.mean()
        alike = [abs(float(away[lag:] @ away[:-lag])) / float(away @ away) < near for lag in range(1, most + in_a_row)]
        lags.append(next((lag for lag in range(most) if all(alike[lag : lag + in_a_row])), most))
    return 2 * max(*lags, 1)


def _highest(logs: Floats, n: int, sides: tuple[bool, bool]) -> float:
    """How far the stretch of `n` that stands out farthest does."""
    inside, around = (_medians(logs, size) for size in (n, AROUND))
    at = np.arange(AROUND, len(logs) - n - AROUND)
    levels = [around[place] for place, there in ((at - AROUND, sides[0]), (at + n, sides[1])) if there]
    return float(np.max(inside[at] - np.max(levels, axis=0)))


def _medians(logs: Floats, size: int) -> Floats:
    """Of the `size` values from each on."""
    upper = rank_filter(logs, size // 2, size, mode="nearest")
    if size % 2 == 0:
        upper = (upper + rank_filter(logs, size // 2 - 1, size, mode="nearest")) / 2
    return np.asarray(upper[size // 2 :])
