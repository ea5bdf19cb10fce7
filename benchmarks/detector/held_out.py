"""Whole jobs by series that no rule can have been chosen on: false alarms beside two plain rules, and what is stated.

The rules of whole jobs were chosen on series of MLPerf, Megatron-LM and Azure. Held out are

1. Alibaba's workers, each a series by itself, those left out that its labels call slow; what is named is held against questions
   that know no detector (phases.py);
2. made-up series of their noise, with and without episodes (episodes.py): of these it is known what is slow;
3. series that the bench records itself, on the machine that it runs on, which did not exist when anything was chosen. Other
   work on the machine is a real slowdown there, so alarms have no bar. A quarter, half and three quarters of the way the size
   is put in that is stated to be the smallest there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from support.traces.noisy_series import Episode, Floats, Recorded, alibaba

from unskew.analytics.core.outcome import Sight
from unskew.analytics.detector.job_wide import JobWideOptions, follow, sight_of
from unskew.analytics.lab.studies.noise import load_noise
from unskew.benchmarks.detector.episodes import FACTORS, LENGTHS, RULES, N, outing, unskew
from unskew.benchmarks.detector.episodes import series as made_up
from unskew.benchmarks.detector.phases import judged
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

STEPS, TIMES_EACH, LASTS, REPEATS = 600, 2, 100, 4
SIDE, VALUES = 240, 300_000


def _multiply(random: np.random.Generator) -> Callable[[], object]:
    one = random.normal(size=(SIDE, SIDE))
    return lambda: one @ one @ one


def _sort(random: np.random.Generator) -> Callable[[], object]:
    values = random.normal(size=VALUES)
    return lambda: np.sort(values)


def _copy(random: np.random.Generator) -> Callable[[], object]:
    values = random.normal(size=8 * VALUES)
    return lambda: (values + 1.0) * values


WORKS: dict[str, Callable[[np.random.Generator], Callable[[], object]]] = {
    "multiplying": _multiply, "sorting": _sort, "copying": _copy,
}  # fmt: skip
"""What a step does: it computes, branches, or moves memory."""


def figures(bench: Bench, steps: int = STEPS) -> Iterator[Figure]:
    """Of both kinds of series."""
    if workers := [*alibaba()]:
        yield from _alarms("Alibaba's workers without a label", workers, bar=0)
        yield from _made_up()
    else:
        note = "data set alibaba-minibatch is absent: set UNSKEW_DATASETS"
        yield figure("Alibaba's workers without a label: false alarms", None, "", bar=0, better="lower", note=note)
    own = [recorded(work, number, steps) for number in bench.steps("series recorded here", range(TIMES_EACH)) for work in WORKS]
    yield from _alarms("series recorded by the bench", own, bar=None)
    yield _stated(own)


def recorded(work: str, number: int, steps: int) -> Recorded:
    """A series of a loop of one process, as it goes."""
    step, times, begun = WORKS[work](np.random.default_rng(number)), np.empty(steps), time.perf_counter()
    for i in range(steps):
        step()
        times[i], begun = (now := time.perf_counter()) - begun, now
    return Recorded(f"{work} {number}", work, np.arange(steps), times)


def _alarms(what: str, series: Sequence[Recorded], *, bar: float | None) -> Iterator[Figure]:
    """What is named in them as they are."""
    seed, steps = load_noise().seeds.figures, sum(len(one.times) for one in series)
    phases = [
        phase
        for one in series
        for phase in judged(one, [(a.since, a.until or len(one.times)) for a in unskew(1e6 * one.times)], series, seed)
    ]
    beside = {name: sum(len(rule(1e6 * one.times)) for one in series) for name, rule in RULES.items() if name != "unskew"}
    false = [str(one) for one in phases if one.why]
    note = f"{len(series)} series, {steps:,} steps; alarms of {', '.join(f'{name} {n}' for name, n in beside.items())}"
    yield figure(f"{what}: false alarms", len(false), "", bar=bar, better="lower", note="; ".join([note, *false]))
    real = [str(one) for one in phases if not one.why]
    yield figure(f"{what}: episodes that are phases of their own", len(real), "", better="higher", note="; ".join(real))


def _made_up() -> Iterator[Figure]:
    """Series of 300 iterations of the workers' noise, by each rule."""
    made = [*made_up(load_noise().seeds.figures, REPEATS, (alibaba,))]
    outings = {name: [outing(rule, *one) for one in made] for name, rule in RULES.items()}
    alarms = {name: 1000 * sum(one.false for one in of) / (N * len(of)) for name, of in outings.items()}
    beside = ", ".join(f"{name} {alarms[name]:.2f}" for name in alarms if name != "unskew")
    name, note = "made-up series of Alibaba's noise: ", f"{len(made)} series; {beside}"
    yield figure(f"{name}false alarms in 1,000 iterations", alarms["unskew"], "", better="lower", note=note)
    for factor in FACTORS:
        found = {
            name: [d for one in of for e, d in zip(one.episodes, one.delays, strict=True) if e.factor == factor and not e.ramp]
            for name, of in outings.items()
        }
        shares = {name: 100 * sum(d is not None for d in delays) / len(delays) for name, delays in found.items()}
        note = f"of {len(found['unskew'])}, {min(LENGTHS)} to {max(LENGTHS)} iterations long; median delay "
        note += f"{np.median([d for d in found['unskew'] if d is not None]):g}; "
        note += ", ".join(f"{name} {shares[name]:.0f} %" for name in shares if name != "unskew")
        yield figure(f"{name}episodes of x{factor:g} found", shares["unskew"], "%", better="higher", note=note)


def _stated(series: Sequence[Recorded]) -> Figure:
    """Whether a slowdown of the size that is stated is named, which is put in where nothing is slow."""
    named, sizes, unseen = 0, list[float](), 0
    for one in series:
        for at in (len(one.times) * part // 4 for part in (1, 2, 3)):
            state, _ = follow(enumerate(1e6 * one.times[:at]))
            sight: Sight = sight_of(state, JobWideOptions())
            if state.since is not None or not sight.sees:
                unseen += 1
                continue
            sizes.append(sight.smallest_slowdown or 1.0)
            episode = Episode(at, min(LASTS, len(one.times) - at), sizes[-1])
            named += any(alarm.names(episode) for alarm in unskew(_slowed(one.times, episode)))
    name = f"series recorded by the bench: slowdowns of the stated size named, for {LASTS} steps"
    if not sizes:
        return figure(name, None, "%", bar=95, better="higher", note="nothing was stated")
    note = f"{named} of {len(sizes)}; stated: median x{np.median(sizes):.2f}, {min(sizes):.2f} to {max(sizes):.2f}"
    note += f"; at {unseen} of {unseen + len(sizes)} places nothing is, or something was slow"
    return figure(name, 100 * named / len(sizes), "%", bar=95, better="higher", note=note)


def _slowed(times: Floats, episode: Episode) -> Floats:
    slower = 1e6 * times
    slower[episode.at : episode.until] *= np.exp(episode.logs)
    return np.asarray(slower)
