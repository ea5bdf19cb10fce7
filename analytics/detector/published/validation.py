"""What Greyhound and ResiHP do once they suspect a failure: profile, then validate (papers: Greyhound section 4, unchanged in
ResiHP).

* profile: ranks of equal role are compared, who is more than 10 % above their median is suspicious (communication groups of
  equal volume in the paper; here a chunk's own time, which is kinder to the method: it has no waiting in it);
* validation: a matrix product on the suspects while training waits; who takes more than 10 % longer than a healthy device is
  the culprit. Without a probe (a recorded log) the profile decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from unskew.analytics.core.iteration import Chunk
from unskew.analytics.core.plan import Plan

Probe = Callable[[Sequence[int]], Mapping[int, float]]
"""Ranks -> measured over healthy time of the same matrix product on each of them, now, while training waits."""

ABOVE = 1.1


def comparable(recent: Sequence[tuple[Chunk, ...]], plan: Plan) -> set[int]:
    """The ranks that computed and had another of their role to be compared with: of whom the profile says something."""
    ran = {chunk.rank for chunks in recent for chunk in chunks}
    roles = Counter(role.layers for role in plan.roles if role.rank in ran)
    return {role.rank for role in plan.roles if role.rank in ran and roles[role.layers] > 1}


def profile(recent: Sequence[tuple[Chunk, ...]], plan: Plan) -> dict[int, float]:
    """rank -> its mean chunk time over the median of the ranks of its role, over some iterations; only who is above `ABOVE`."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for chunks in recent:
        for chunk in chunks:
            sums[chunk.rank] = sums.get(chunk.rank, 0.0) + chunk.us
            counts[chunk.rank] = counts.get(chunk.rank, 0) + 1
    mean = {rank: sums[rank] / counts[rank] for rank in sums}
    groups: dict[tuple[int, ...], list[int]] = {}
    for role in plan.roles:
        if role.rank in mean:
            groups.setdefault(role.layers, []).append(role.rank)
    ratio = {rank: mean[rank] / median(mean[r] for r in group) for group in groups.values() for rank in group}
    # The median of two is their mean: the slower one of a pair is compared with the other.
    for group in groups.values():
        if len(group) == 2:
            one, other = group
            ratio[one], ratio[other] = mean[one] / mean[other], mean[other] / mean[one]
    return {rank: value for rank, value in sorted(ratio.items()) if value > ABOVE}


def validate(suspects: Mapping[int, float], plan: Plan, probe: Probe | None) -> dict[int, float]:
    """rank -> how many times slower than healthy it computes, for the culprits; all are tested when nobody is suspicious."""
    if probe is None:
        return dict(suspects)
    measured = probe(sorted(suspects) or plan.ranks)
    return {rank: ratio for rank, ratio in sorted(measured.items()) if ratio > ABOVE}
