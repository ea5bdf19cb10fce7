"""Slow episodes of whole jobs in unseen series: found, how late, of what size, merged, false alarms, beside two plain rules.

The noise is real and resampled (tests/support/traces/noisy_series.py), the seeds are those of figures: nothing was tuned on
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

import msgspec
import numpy as np
from support.traces.noisy_series import SOURCES, Episode, Floats, Recorded, megatron, mlperf, residuals, spread, unseen

from unskew.analytics.detector.job_wide import judge
from unskew.analytics.diagnosis.failslow import settled
from unskew.analytics.lab.baselines import nvrx
from unskew.analytics.lab.studies.noise import load_noise
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

N = 300
LENGTHS, FACTORS = (5, 10, 20, 50, 100), (1.1, 1.3, 1.8)
RETURNS = 3
GAP = 20  # healthy iterations between episodes that come again
QUIET = 0.02  # of the log: less noise than this is a quiet series
LATE = 3  # iterations after its end in which an episode may still be named, and before its onset it may be dated
LONG = 20  # iterations from which on an episode's size is asked for: the median of fewer is no better than the noise
SIZE_OFF = {True: 2.0, False: 5.0}
"""Percent by which a stated size may be off: of a quiet series its noise, of the others half of the smallest slowdown."""
ABSENT = "data sets mlperf-steptimes, megatron-iteration-times and azure-vm-noise are absent: set UNSKEW_DATASETS"


class Alarm(msgspec.Struct, frozen=True):
    """A slowdown as a rule names it, in iteration `at`; `until` None = to the end. `factor`: how much longer its iterations are
    said to take in the end, None where the rule does not say."""

    since: int
    at: int
    until: int | None
    factor: float | None = None

    def covers(self, episode: Episode) -> bool:
        """Whether it speaks of some of the episode."""
        return self.since < episode.until and (self.until is None or self.until > episode.at)

    def names(self, episode: Episode) -> bool:
        """Whether it was given while the episode went on, or just after, and of nothing long before it."""
        return episode.at <= self.at < episode.until + LATE and self.since >= episode.at - LATE


class RuleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One series through one rule. `delays`: per episode the slowed iterations until it was named, None = it was not; `stated`:
    the alarm that named it first; `merged`: alarms that cover several episodes; `false`: those that name none."""

    episodes: tuple[Episode, ...]
    quiet: bool
    delays: tuple[int | None, ...]
    stated: tuple[Alarm | None, ...]
    merged: int
    false: int


def unskew(times_us: Floats) -> list[Alarm]:
    """The verdicts of job_wide.py, when each was first given."""
    verdicts, first = judge(enumerate(times_us)), dict[int, int]()
    for verdict in verdicts:
        first.setdefault(verdict.verdict, verdict.at_iteration)
    return [
        Alarm(one.since_iteration, first[one.verdict], one.until_iteration, float(one.evidence["time_ratio"]))
        for one in settled(verdicts)
    ]


def trailing(times_us: Floats, window: int = 50, in_a_row: int = 3) -> list[Alarm]:
    """1.1 times the median of the `window` iterations before, `in_a_row` times; over when it is not."""
    slow = [i >= 5 and t > 1.1 * median(times_us[max(0, i - window) : i]) for i, t in enumerate(times_us)]
    return _runs(slow, in_a_row)


def sections(times_us: Floats) -> list[Alarm]:
    """NVRx's individual score of one section, the iteration: the median of each ten against the lowest so far."""
    slow, lowest = [False] * len(times_us), dict[int, dict[str, float]]()
    for end in range(nvrx.EVERY, len(times_us) + 1, nvrx.EVERY):
        found = nvrx.scores({0: {"iteration": float(np.median(times_us[end - nvrx.EVERY : end]))}}, lowest)
        lowest = found.lowest
        flagged = found.individual[0]["iteration"] < nvrx.THRESHOLD
        slow[end - nvrx.EVERY : end] = [flagged] * nvrx.EVERY
    return _runs(slow, nvrx.EVERY)


def _runs(slow: list[bool], least: int) -> list[Alarm]:
    """Each run of `least` slow iterations or more, named in the last of them."""
    edges = np.flatnonzero(np.diff([False, *slow, False]))
    pairs = [(int(since), int(until)) for since, until in zip(edges[::2], edges[1::2], strict=True)]
    return [Alarm(since, since + least - 1, until) for since, until in pairs if until - since >= least]


RULES: dict[str, Callable[[Floats], list[Alarm]]] = {"unskew": unskew, "1.1x": trailing, "NVRx": sections}


def figures(_bench: Bench, repeats: int = 4) -> list[Figure]:
    """All series of all kinds through each rule."""
    seed = load_noise().seeds.figures
    found = {name: [outing(rule, *one) for one in series(seed, repeats)] for name, rule in RULES.items()}
    if not found["unskew"]:
        return [figure("episodes in unseen series: found", None, "%", better="higher", note=ABSENT)]
    as_they_are = [1e6 * one.times for one in [*mlperf(), *megatron()]]
    return [
        line
        for name, outings in found.items()
        for line in [*_lines(name, outings), _as_they_are(name, [len(RULES[name](times)) for times in as_they_are])]
    ]


def series(
    seed: int, repeats: int, sources: Sequence[Callable[[], Iterable[Recorded]]] = tuple(SOURCES.values())
) -> Iterator[tuple[Floats, tuple[Episode, ...], bool]]:
    """Times, the episodes in them, and whether their noise is small: the same for each rule. `sources`: of the noise."""
    for number, source in enumerate(sources):
        pool, random = residuals(source()), np.random.default_rng([seed, number])
        for _ in range(repeats if pool else 0):
            for episodes in kinds(random):
                residual = pool[int(random.integers(len(pool)))]
                yield unseen(residual, N, episodes, random), episodes, spread(residual) < QUIET


def kinds(random: np.random.Generator) -> Iterator[tuple[Episode, ...]]:
    """None; one of each length and factor, early, in the middle and late; ramps; episodes that come again."""
    for factor in FACTORS:
        yield ()
        for length in LENGTHS:
            for earliest, latest in ((12, 30), (100, 150), (N - length - 40, N - length - 10)):
                yield (Episode(int(random.integers(earliest, latest)), length, factor),)
        yield (Episode(int(random.integers(40, 150)), 100, factor, ramp=True),)
        length, at = int(random.integers(10, 40)), int(random.integers(30, 80))
        yield tuple(Episode(at + i * (length + GAP), length, factor) for i in range(RETURNS))


def outing(rule: Callable[[Floats], list[Alarm]], times_us: Floats, episodes: tuple[Episode, ...], quiet: bool) -> RuleOutcome:
    """What a rule makes of a series."""
    alarms = rule(times_us)
    stated = tuple(
        min((alarm for alarm in alarms if alarm.names(episode)), key=lambda one: one.at, default=None) for episode in episodes
    )
    delays = tuple(one.at - episode.at + 1 if one else None for one, episode in zip(stated, episodes, strict=True))
    merged = sum(sum(alarm.covers(episode) for episode in episodes) > 1 for alarm in alarms)
    false = sum(not any(alarm.names(episode) for episode in episodes) for alarm in alarms)
    return RuleOutcome(episodes=episodes, quiet=quiet, delays=delays, stated=stated, merged=merged, false=false)


def _lines(name: str, outings: list[RuleOutcome]) -> Iterator[Figure]:
    bars = name == "unskew"
    for factor, within in ((1.1, 20), (1.3, 5), (1.8, 5)):
        delays = [d for o in outings if o.quiet for e, d in zip(o.episodes, o.delays, strict=True)
                  if e.factor == factor and not e.ramp and e.length >= within]  # fmt: skip
        known = [d for d in delays if d is not None]
        note = f"quiet series, episodes of {within} iterations and more: {len(known)} of {len(delays)} found"
        if known:
            note += f"; median {median(known):g}"
        p95 = float(np.percentile(known, 95)) if known else None
        bar = within if bars else None
        yield figure(f"{name}: delay at x{factor:g}, p95", p95, "iterations", bar=bar, better="lower", note=note)
    for quiet in (True, False) if bars else ():
        yield from _stated(name, outings, quiet)
    for length in LENGTHS:
        share = {factor: _share(outings, length, factor) for factor in FACTORS}
        note = "; ".join(f"x{factor:g}: {100 * found:.0f} %" for factor, found in share.items())
        yield figure(
            f"{name}: episodes of {length} iterations found", 100 * float(np.mean([*share.values()])), "%", better="higher",
            note=f"all series; {note}",
        )  # fmt: skip
    ramps = [d for o in outings for e, d in zip(o.episodes, o.delays, strict=True) if e.ramp]
    found = sum(d is not None for d in ramps)
    yield figure(f"{name}: ramps found", 100 * found / len(ramps), "%", better="higher", note=f"{found} of {len(ramps)}")
    again = [o for o in outings if len(o.episodes) == RETURNS]
    found, merged = sum(d is not None for o in again for d in o.delays), sum(o.merged for o in again)
    yield figure(
        f"{name}: episodes that come again found", 100 * found / (RETURNS * len(again)), "%", better="higher",
        note=f"{RETURNS} each in {len(again)} series, {GAP} healthy iterations between; merged {merged}",
    )  # fmt: skip
    alarms, n = sum(o.false for o in outings), N * len(outings)
    note = f"{alarms} in {len(outings)} series of {N}; real phases of the noise among them"
    yield figure(f"{name}: false alarms in 1,000 iterations", 1000 * alarms / n, "", better="lower", note=note)


def _stated(name: str, outings: list[RuleOutcome], quiet: bool) -> Iterator[Figure]:
    """How what is said of named episodes in the end differs from what was put in: the size, and both ends."""
    pairs = [(e, a) for o in outings if o.quiet is quiet for e, a in zip(o.episodes, o.stated, strict=True)
             if a is not None and not e.ramp and e.length >= LONG]  # fmt: skip
    kind, note = "quiet" if quiet else "other", f"{len(pairs)} named episodes of {LONG} iterations and more, no ramps"
    over = [a.factor / e.factor for e, a in pairs if a.factor is not None]
    middle, *ends = (float(np.percentile(over, at)) if over else float("nan") for at in (50, 5, 95))
    off = float(np.percentile(np.abs(np.array(over) - 1), 95)) if over else None
    sizes = f"{note}; stated over injected: median {middle:.3f}, from 5th to 95th percentile {ends[0]:.3f} to {ends[1]:.3f}"
    yield figure(
        f"{name}: stated size in {kind} series, off by, p95", None if off is None else 100 * off, "%", bar=SIZE_OFF[quiet],
        better="lower", note=sizes,
    )  # fmt: skip
    for what, apart in (
        ("onset", [abs(a.since - e.at) for e, a in pairs]),
        ("end", [abs((N if a.until is None else a.until) - e.until) for e, a in pairs]),
    ):
        p95 = float(np.percentile(apart, 95)) if apart else None
        far = f"{note}; more than {LATE} in {sum(one > LATE for one in apart)}, at most {max(apart, default=0)}"
        yield figure(
            f"{name}: stated {what} in {kind} series, apart, p95", p95, "iterations", bar=LATE, better="lower", note=far
        )


def _as_they_are(name: str, alarms: list[int]) -> Figure:
    note = f"{len(alarms)} series, alarms in {sum(map(bool, alarms))} of them"
    return figure(f"{name}: alarms in MLPerf and Megatron series as they are", sum(alarms), "", better="lower", note=note)


def _share(outings: list[RuleOutcome], length: int, factor: float) -> float:
    one = [o.delays[0] for o in outings if len(o.episodes) == 1]
    which = [o.episodes[0] for o in outings if len(o.episodes) == 1]
    chosen = [d for e, d in zip(which, one, strict=True) if (e.length, e.factor, e.ramp) == (length, factor, False)]
    return sum(d is not None for d in chosen) / len(chosen)
