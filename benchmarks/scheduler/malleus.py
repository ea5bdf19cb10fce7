"""Malleus' search for templates against trying all of them: large random problems, a minute of enumeration for each.

An enumeration that does not end in time still says what it has found, and the search may not be worse than that either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TypedDict

import numpy as np
from support.planning.malleus_enumeration import TemplateEnumeration

from unskew.analytics.planners.malleus_templates import Kind, TemplateSearch
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

PROBLEMS = 40
FIRST_SEED = 20_000
WITHIN_S = 60.0
MOST_STRAGGLING = 16
SAME = 1e-7
WHOLE: Kind = (1.0, 4)


class TemplateProblem(TypedDict):
    """What `TemplateSearch` and `TemplateEnumeration` are given besides the kinds of groups."""

    pipelines: int
    n_layers: int
    micro_batches: int
    limits: Callable[[Sequence[int]], Sequence[int]] | None


def figures(bench: Bench, problems: int = PROBLEMS, within_s: float = WITHIN_S) -> Iterator[Figure]:
    """The search over the enumeration, and how far each reached."""
    over, ended, largest, longest_s, slowest_s = list[float](), 0, 0, 0.0, 0.0
    for seed in bench.steps(f"templates of Malleus, up to {within_s:g} s each", range(FIRST_SEED, FIRST_SEED + problems)):
        kinds, problem = template_problem(np.random.default_rng(seed))
        begun = time.perf_counter()
        found = TemplateSearch(kinds, WHOLE, **problem).best()
        slowest_s, begun = max(slowest_s, time.perf_counter() - begun), time.perf_counter()
        known = TemplateEnumeration(kinds, WHOLE, **problem).best(within_s)
        if known.whole:
            ended, largest = ended + 1, max(largest, known.templates)
            longest_s = max(longest_s, time.perf_counter() - begun)
        objective = found[0] if found else inf
        if known.objective < inf:
            over.append(objective / known.objective - 1.0)
    note = f"{ended} enumerations ended, the longest after {longest_s:.0f} s, the largest of {largest:,} templates; "
    note += f"seeds from {FIRST_SEED:,}; a search took at most {slowest_s:.1f} s"
    worse = sum(one > SAME for one in over)
    yield figure(
        f"of {len(over)} problems, the search is worse than the enumeration", worse, "", bar=0, better="lower", note=note
    )
    yield figure("the search over the enumeration, at most", 100.0 * max(over), "%", bar=100.0 * SAME, better="lower")


def template_problem(random: np.random.Generator) -> tuple[list[Kind], TemplateProblem]:
    """8 to 16 straggling groups of many kinds in 2 to 12 pipelines; in half of them memory that is less at the front."""
    pipelines, straggling = int(random.integers(2, 13)), int(random.integers(8, MOST_STRAGGLING + 1))
    distinct = int(random.integers(straggling // 2, straggling + 1))
    rates, degrees = random.uniform(1.2, 8.0, distinct), random.choice([1, 2, 4, 4], distinct)
    own = random.integers(0, distinct, straggling)
    kinds = [(float(rates[kind]), int(degrees[kind])) for kind in own]
    kinds += [WHOLE] * int(random.integers(max(0, pipelines - straggling), 8 * pipelines))
    n_layers = int(random.integers(max(len(kinds) // pipelines + 1, 10), 100))
    micro_batches = pipelines * int(random.integers(2, 33))
    held = float(random.uniform(1.1, 2.5)) * n_layers * pipelines / sum(degree for _, degree in kinds)
    in_flight, limited = float(random.uniform(0.0, 0.1)), random.random() < 0.5

    def room(of: Sequence[int]) -> list[int]:
        last = len(of) - 1
        return [min(n_layers, int(held * degree / (1.0 + in_flight * (last - place)))) for place, degree in enumerate(of)]

    limits = room if limited else None
    return kinds, {"pipelines": pipelines, "n_layers": n_layers, "micro_batches": micro_batches, "limits": limits}
