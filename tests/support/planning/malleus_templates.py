"""Every template of Malleus' space, to tell how far its search is from the best.

Any straggling group in any pipeline, whichever pipelines have a stage more; layers and micro-batches by trying every value that
an optimum can have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from math import inf

Kind = tuple[float, int]


def enumerated(
    kinds: Sequence[Kind],
    whole: Kind,
    *,
    pipelines: int,
    n_layers: int,
    micro_batches: int,
    limits: Callable[[Sequence[int]], Sequence[int]] | None,
) -> float:
    """The least objective of all templates; inf when the layers fit none."""
    straggling = sorted((kind for kind in kinds if kind != whole), key=lambda kind: (-kind[0], kind[1]))
    base, more = divmod(len(kinds), pipelines)
    known: dict[tuple[Kind, ...], float] = {}
    best = inf
    seen = set()
    for longer in combinations(range(pipelines), more):
        for places in product(range(pipelines), repeat=len(straggling)):
            parts = []
            for i in range(pipelines):
                own = [kind for kind, place in zip(straggling, places, strict=True) if place == i]
                parts.append((*own, *[whole] * (base + (i in longer) - len(own))))
            template = tuple(sorted(parts))
            if template in seen or sum(map(len, parts)) != len(kinds):
                continue
            seen.add(template)
            for part in parts:
                if part not in known:
                    known[part] = least_busy(part, n_layers, limits)
            least = [len(part) for part in parts] if len(kinds) <= micro_batches else [1] * pipelines
            best = min(best, least_objective([known[part] for part in parts], least, micro_batches))
    return best


def least_busy(part: Sequence[Kind], n_layers: int, limits: Callable[[Sequence[int]], Sequence[int]] | None) -> float:
    """The least slowest stage of a pipeline: the first of all values rate x layers under which the layers fit."""
    room = [n_layers] * len(part) if limits is None else limits([degree for _, degree in part])
    for end in sorted({rate * layers for rate, _ in part for layers in range(1, n_layers + 1)}):
        if sum(min(most, int(end / rate + 1e-9)) for (rate, _), most in zip(part, room, strict=True)) >= n_layers:
            return end
    return inf


def least_objective(slowest: Sequence[float], least: Sequence[int], micro_batches: int) -> float:
    """The least ``max o m``: the first of all values under which the pipelines take all micro-batches."""
    if inf in slowest:
        return inf
    floor = max(o * m for o, m in zip(slowest, least, strict=True))
    for end in sorted({o * m for o in slowest for m in range(1, micro_batches + 1)}):
        if end >= floor - 1e-9 and sum(int(end / o + 1e-9) for o in slowest) >= micro_batches:
            return end
    return inf
