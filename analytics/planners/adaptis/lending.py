"""Single layers of single micro-batches lent to other ranks, where whole layers leave no even shares of a replica.

A replica that lost half a rank has 3.5 of 4: with whole layers its busiest rank has 5 of 16 where 4.57 would do, for each of
its micro-batches, and none of it can go to another replica but as a whole micro-batch. Of 128 layers of micro-batches in all,
7.5 ranks can have 17 or 18 each. The search, from paths that are there:

1. an order for them by the rule of `dispatch`, under the best of six pairs of knobs;
2. the first or last layer of a leg goes to another rank, drawn at random (seeded), more often from the busiest rank and seldom
   to one that would be busier than it; kept where the iteration of mean micro-batches ends earlier, or no later with more
   even work; until `TRIED` draws in a row are in vain;
3. again from the start with other draws, until a part of the scheduled actions is used up. The ends of all descents are priced
   by who asks, on real batches, where they differ more than by mean micro-batches;
4. from the best of them draws from any rank to any, each that ends at most `LATER` by mean micro-batches priced, kept where the
   price is less.

No rank is left without work, and a layer that two ranks held two ranks hold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import chain, product
from math import inf
from typing import Literal

import msgspec
import numpy as np

from unskew.analytics.planners.adaptis.dispatch import DispatchOptions
from unskew.analytics.planners.adaptis.paths import OrderedPaths, Paths, PathsTask, joined, ordered
from unskew.collector.events import CHUNK_KINDS

TURNS: tuple[Literal["latest", "groups", "lowest"], ...] = ("latest", "groups", "lowest")
TRIED = 60
FROM_BUSIEST, BEYOND_BUSIEST = 0.7, 0.1
"""How often the busiest rank gives; how often a rank may take what makes it busier than that."""
PRICED_AS = 8
DESCENDING = 0.3
"""Of all scheduled actions."""
REFINING, LATER, OTHER_KNOBS = 1_000, 1.01, 0.2
"""Draws after the descents; how much later one may end that is priced; how often one is ordered by other knobs."""
MORE_KEPT = 1.25
"""Who does others' work keeps their activations: up to so many times what the busiest rank keeps before."""


class _State(msgspec.Struct, frozen=True):
    found: OrderedPaths
    knobs: DispatchOptions
    works_us: dict[int, float]
    executors: dict[int, Counter[int]]

    @property
    def merit(self) -> tuple[float, float]:
        """The less the better: when the last chunk ends, then how uneven the work is."""
        return round(self.found.makespan_us, 3), round(sum(us * us for us in self.works_us.values()), 3)


def lent(
    task: PathsTask, start: Paths, limit: float, actions: int, price_us: Callable[[OrderedPaths], float]
) -> OrderedPaths | None:
    """The paths of the least price found with some `actions` scheduled, with their order; None when no price is finite, or when
    the orders of the start alone leave no actions to descend. `limit`: the layers of micro-batches that a rank may keep."""
    search = _Lending(task, limit, round(actions * DESCENDING))
    if search.left <= len(search.knobs) * len(CHUNK_KINDS) * sum(map(len, start)):
        return None
    begin, ends = search.best_ordered(start), list[_State]()
    while search.left > 0:
        ends.append(search.descend(begin, len(ends)))
    prices = [search.priced(end.found, price_us) for end in ends]
    least = min(range(len(ends)), key=prices.__getitem__)
    search.left += actions - round(actions * DESCENDING)
    return search.refined(ends[least], prices[least], price_us).found if prices[least] < inf else None


class _Draw(msgspec.Struct, frozen=True):
    """The first or `last` layer of a leg (micro-batch, hop) goes to `taker`."""

    leg: tuple[int, int]
    taker: int
    last: bool

    def layer(self, state: _State) -> int:
        """Which one that is."""
        number, hop = self.leg
        _, first, n = state.found.paths[number][hop]
        return first + n - 1 if self.last else first


class _Lending:
    def __init__(self, task: PathsTask, limit: float, actions: int) -> None:
        self.task, self.left = task, actions
        self.knobs = [DispatchOptions(limit, turn=turn, patience=patience) for turn, patience in product(TURNS, (0.0, 0.5))]

    def best_ordered(self, paths: Paths) -> _State:
        """Under the best of all knobs."""
        return min((self._state(paths, knobs) for knobs in self.knobs), key=lambda one: one.found.makespan_us)

    def descend(self, state: _State, seed: int) -> _State:
        """One descent, whose draws follow from `seed`."""
        random = np.random.default_rng(seed)
        while self.left > 0:
            better = self._lent_one(state, random)
            if better is None:
                better = self.best_ordered(state.found.paths)
                if better.found.makespan_us >= state.found.makespan_us:
                    break
            state = better
        return state

    def _state(self, paths: Paths, knobs: DispatchOptions, most_us: float = inf) -> _State:
        works_us, executors = defaultdict[int, float](float), defaultdict[int, Counter[int]](Counter)
        for path in paths:
            for leg in path:
                rank, first, n = leg
                works_us[rank] += self.task.works_us(leg)
                for layer in range(first, first + n):
                    executors[layer][rank] += 1
        found = ordered(self.task, paths, knobs, works_us, most_us)
        self.left -= found.actions
        return _State(found, knobs, works_us, executors)

    def priced(self, found: OrderedPaths, price_us: Callable[[OrderedPaths], float]) -> float:
        """Its price, which takes as long as scheduling it some times."""
        self.left -= PRICED_AS * found.actions
        return price_us(found)

    def refined(self, state: _State, least_us: float, price_us: Callable[[OrderedPaths], float]) -> _State:
        """What draws from any rank to any make of it, by their price."""
        random = np.random.default_rng(0)
        for _ in range(REFINING):
            if self.left <= 0:
                break
            legs = [*chain.from_iterable(_legs(state).values())]
            knobs = self.knobs[random.integers(len(self.knobs))] if random.random() < OTHER_KNOBS else state.knobs
            draw = _Draw(legs[random.integers(len(legs))], int(random.choice([*state.works_us])), bool(random.integers(2)))
            tried = self._after(state, draw, knobs, LATER * state.found.makespan_us)
            if tried is not None and tried.found.makespan_us < inf and (us := self.priced(tried.found, price_us)) < least_us:
                state, least_us = tried, us
        return state

    def _lent_one(self, state: _State, random: np.random.Generator) -> _State | None:
        """The first of some draws that is better."""
        legs, ranks = _legs(state), sorted(state.works_us)
        busiest = max(ranks, key=lambda rank: state.works_us[rank])
        for _ in range(TRIED):
            giver = busiest if random.random() < FROM_BUSIEST else ranks[random.integers(len(ranks))]
            leg, taker = legs[giver][random.integers(len(legs[giver]))], ranks[random.integers(len(ranks))]
            draw, beyond = _Draw(leg, taker, bool(random.integers(2))), random.random() < BEYOND_BUSIEST
            then_us = state.works_us[taker] + self.task.works_us((taker, draw.layer(state), 1))
            if then_us >= state.works_us[busiest] and not beyond:
                continue
            tried = self._after(state, draw, state.knobs, state.found.makespan_us) if self.left > 0 else None
            if tried is not None and tried.merit < state.merit:
                return tried
        return None

    def _after(self, state: _State, draw: _Draw, knobs: DispatchOptions, most_us: float) -> _State | None:
        """With a layer lent, where it may be."""
        (number, hop), taker, layer = draw.leg, draw.taker, draw.layer(state)
        paths = [*state.found.paths]
        path = paths[number]
        giver, first, n = path[hop]
        if taker == giver or not _may(state, giver, taker, layer):
            return None
        rest = (giver, first if draw.last else first + 1, n - 1)
        paths[number] = joined(
            (*path[:hop], *((rest, (taker, layer, 1)) if draw.last else ((taker, layer, 1), rest)), *path[hop + 1 :])
        )
        return self._state(tuple(paths), knobs, most_us)


def _legs(state: _State) -> dict[int, list[tuple[int, int]]]:
    """Rank -> (micro-batch, hop) of what it executes."""
    legs = defaultdict[int, list[tuple[int, int]]](list)
    for number, path in enumerate(state.found.paths):
        for hop, (rank, _, _) in enumerate(path):
            legs[rank].append((number, hop))
    return legs


def _may(state: _State, giver: int, taker: int, layer: int) -> bool:
    """Whether the giver keeps work, and two hold the layer where two did."""
    holders = state.executors[layer]
    lost = holders[giver] == 1 and taker in holders and len(holders) <= 2
    return not lost and sum(of[giver] for of in state.executors.values()) > 1
