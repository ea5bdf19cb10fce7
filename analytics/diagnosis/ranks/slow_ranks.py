"""Verdicts on the ranks and stages of a recording whose workload was inferred, as they were estimated with it (slowness.py)."""

from __future__ import annotations

from math import exp

import msgspec
import numpy as np

from unskew.analytics.core.outcome import Findings, Sight, is_close, percent
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.stages import stage_verdict
from unskew.analytics.detector.verdicts import Excess, SpeedChange, slow_verdict
from unskew.analytics.diagnosis.slowness.places import SlowPlace, SlowStretch
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.collector.events import Verdict


def follow_section(section: TraceSection, options: DetectorOptions) -> Findings:
    """Who is slow, in the order of onsets; and what would have been named."""
    episodes: list[SlowStretch] = []
    for one in sorted(section.slowness.named, key=lambda one: (one.who.replicas, one.who.stages, one.begin)):
        last = episodes[-1] if episodes else None
        if last is not None and last.who == one.who and one.begin <= last.end:
            episodes[-1] = _together(last, one)
        elif not one.who.is_replica:
            episodes.append(one)
    episodes.sort(key=lambda one: one.begin)
    verdicts = [_verdict(section, one, number, options) for number, one in enumerate(episodes, start=1)]
    return Findings(verdicts=tuple(verdicts), sight=_sight(section, options))


def _together(first: SlowStretch, second: SlowStretch) -> SlowStretch:
    """One episode of two levels that follow or add to each other: the mean over its iterations."""
    begin, end = min(first.begin, second.begin), max(first.end, second.end)
    share = [(one.end - one.begin) / (end - begin) for one in (first, second)]
    levels = tuple(share[0] * a + share[1] * b for a, b in zip(first.levels, second.levels, strict=True))
    return SlowStretch(first.who, begin, end, levels, first.gain + second.gain, first.limit)


def _verdict(section: TraceSection, found: SlowStretch, number: int, options: DetectorOptions) -> Verdict:
    iterations, sigma, n = section.recording.iterations, section.slowness.sigma, found.end - found.begin
    stage, ranks = section.stages[found.who.stages[0]], _ranks(section, found.who)
    since, at = iterations[found.begin], iterations[found.end - 1]
    if not found.who.is_rank:
        others = [rank for rank in section.ranks if rank not in ranks]
        level = float(np.mean(found.levels))
        verdict = stage_verdict(number, stage, ranks, others, level, since=since, at=at, n=n, sigma=sigma, options=options)
    else:
        of_kind = dict(zip(section.kinds, found.levels, strict=True))
        slack = options.slack_of(sigma)
        change = SpeedChange(
            since=since,
            iterations=n,
            test="likelihood ratio",
            cusum=found.gain,
            threshold=found.limit,
            levels={kind: level for kind, level in of_kind.items() if level >= slack},
            excess={kind: Excess(level) for kind, level in of_kind.items()},
        )
        replica = section.replicas[found.who.replicas[0]]
        victims = [rank for at, rank in section.rank_at.items() if (at[0] == stage) != (at[1] == replica)]
        verdict = slow_verdict(
            number, ranks[0], change, kinds=len(section.kinds), victims=victims, at=at, sigma=sigma, episodes=1, options=options
        )
    return verdict if found.end == len(iterations) else msgspec.structs.replace(verdict, until_iteration=iterations[found.end])


def _ranks(section: TraceSection, who: SlowPlace) -> list[int]:
    return [
        section.rank_at[section.stages[stage], section.replicas[replica]] for stage in who.stages for replica in who.replicas
    ]


def _sight(section: TraceSection, options: DetectorOptions) -> Sight:
    """None is seen where two explanations are as good, or where a rank has none of its stage to be compared with."""
    slowness, n = section.slowness, len(section.recording.iterations)
    if n < options.least_iterations:
        why = f"{n} iteration{'s' * (n > 1)} could be compared, at least {options.least_iterations} are needed"
        return Sight(scope="device", smallest_slowdown=None, why=why)
    if slowness.ambiguous:
        one, other = (_name(section, who) for who in slowness.ambiguous[0])
        why = f"{one} or {other} is slow, and the trace does not show which"
        return Sight(scope="device", smallest_slowdown=None, why=why)
    change = None if slowness.smallest_change is None else exp(slowness.smallest_change)
    if slowness.smallest is None:
        why = "with one replica, a device slow from the first recorded step on looks like a costly stage"
        named = f"; one that turned slow later by {percent(round(change or 1.0, 3))} or more would have been named"
        later = named if is_close(change) else ""
        return Sight(scope="device", smallest_slowdown=None, why=why + later)
    return Sight(scope="device", smallest_slowdown=round(max(exp(slowness.smallest), change or 0.0), 3))


def _name(section: TraceSection, who: SlowPlace) -> str:
    if who.is_rank:
        return f"rank {_ranks(section, who)[0]}"
    return f"replica {section.replicas[who.replicas[0]]}" if who.is_replica else f"stage {section.stages[who.stages[0]]}"
