"""Which ranks are slow where no lengths are recorded: stages, micro-batches and ranks, estimated together.

Of each rank, kind of work and iteration the log of its median chunk counts, Y [row, replica, iteration]; a row is a kind of
work on a place (a stage, or one of its ranges of layers):

    Y = what the row costs + share x workload of the replica's micro-batches + slowness of the rank + noise

Workload is drawn anew in each iteration, alike on all rows of a replica but for the row's `share` (times grow faster with
length on some rows); slowness is never below zero, of few ranks, and stays for at least some iterations. So with the workload
as a random effect a candidate (a rank or a replica, in a stretch of iterations, with a level per kind of work) is a regressor
of generalised least squares, and the set of candidates is found by orthogonal matching pursuit: the one that explains most is
added, all levels are fitted anew, and each earlier one is exchanged where another explains more. Of replicas see replicas.py;
here they keep their ranks from being blamed.

What this can tell apart is computed, not assumed: what a candidate explains that no other one can. It separates

* a slow rank from long micro-batches, which are long on all stages of their replica;
* a slow rank from a costly stage, which is so in all replicas. With one replica only changes can be seen;
* of two stages and two replicas, a rank from the one diagonally opposite, by the replicas' mean workloads alone: in many
  iterations these are equal.
"""

from __future__ import annotations

from math import log

import msgspec
import numpy as np

from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.diagnosis.slowness.fit import FALSE_ALARMS, SURE_SIGMAS, SlownessFit, noise_in, steady
from unskew.analytics.diagnosis.slowness.places import Rows, Slowness, SlowPlace, SlowStretch
from unskew.analytics.pipeline.dag import Array

MOST_BLOCKS = 96
"""Longer recordings are looked at in so many blocks of iterations: every stretch is tried, and their number grows squared."""
SHORT = 12
"""Iterations in which few ranks change: of so many noise is measured before anything is known to have changed."""
MOST_INSTEAD = 8  # stretches that are tried for one that is taken out: each must pay for itself, so a good explanation has few


def slowness_of(logs: Array, rows: Rows, options: DetectorOptions) -> Slowness:
    """From `logs` [row, replica, iteration]."""
    n = logs.shape[2]
    if n < options.least_iterations:
        return Slowness()
    edges = np.linspace(0, n, min(n, MOST_BLOCKS) + 1).round().astype(int)
    data = steady(logs, options)
    fit = SlownessFit(data, rows, edges, noise_in(data, data.logs, max(n // SHORT, 1), options), options)
    if found := _best(fit):  # what was taken out is no noise
        fit = SlownessFit(data, rows, edges, noise_in(data, fit.left(found), 1, options), options)
        found = _best(fit)
    named, ambiguous, worth = [], [], fit.worth(found)
    heavier = fit.heavier(found)
    ranks = {one.who for one in found if one.who.is_rank}
    crowded = fit.n_replicas == 1 < len(ranks) and 2 * len(ranks) > fit.n_stages  # no stage is left to go by
    for one in found:
        others = _pursued(fit, [other for other in found if other.who != one.who], excluded=one.who)
        instead = [other.who for other in others if other.who not in {same.who for same in found}]
        replica = SlowPlace(tuple(range(fit.n_stages)), one.who.replicas)
        by_data = SURE_SIGMAS * data.share_error * heavier[list(one.who.replicas)].max()
        if crowded or worth - fit.worth(others) < 2 * log(1 / FALSE_ALARMS):
            ambiguous.append((one.who, instead[0] if instead else replica))
        elif one.who.is_rank and max(one.levels) < fit.least + by_data:
            ambiguous.append((one.who, replica))
        else:
            named.append(one)
    return Slowness(tuple(named), tuple(ambiguous), fit.noise.sigma, fit.smallest(0), fit.smallest(len(edges) // 2))


def _best(fit: SlownessFit) -> list[SlowStretch]:
    """The stretches that explain the logs best: what is found first is taken out whole, where others explain more without."""
    found = _pursued(fit, [])
    tried: set[SlowPlace] = set()
    while places := [one.who for one in found if one.who not in tried]:
        tried.add(places[0])
        others = _pursued(fit, [one for one in found if one.who != places[0]], excluded=places[0])
        found = others if fit.worth(others) > fit.worth(found) else found
    return found


def _pursued(fit: SlownessFit, found: list[SlowStretch], excluded: SlowPlace | None = None) -> list[SlowStretch]:
    """More of them, until nothing is left to explain, with their levels as fitted together."""
    most = fit.n_stages * fit.n_replicas if excluded is None else len(found) + MOST_INSTEAD
    found = _exchanged(fit, found, excluded)
    while len(found) < most and (more := fit.best_beside(found, excluded)) is not None:
        found = _exchanged(fit, [*found, more], excluded)
    fitted = fit.fitted(found)
    return [
        msgspec.structs.replace(
            one, levels=tuple(levels), gain=fitted.explained - fit.fitted([*found[:i], *found[i + 1 :]]).explained
        )
        for i, (one, levels) in enumerate(zip(found, fitted.levels.tolist(), strict=True))
    ]


def _exchanged(fit: SlownessFit, found: list[SlowStretch], excluded: SlowPlace | None) -> list[SlowStretch]:
    """Each in turn taken out and the best put in its place, until that improves nothing."""
    worth, changed = fit.worth(found), True
    while changed:
        changed = False
        for i in range(len(found)):
            rest = [*found[:i], *found[i + 1 :]]
            other = fit.best_beside(rest, excluded)
            choice = rest if other is None else [*rest, other]
            if (value := fit.worth(choice)) > worth + 1e-6:
                found, worth, changed = choice, value, True
                break
    return found
