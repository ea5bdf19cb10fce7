"""A probe of a training that is not ours: what its watcher asks, what its ranks answer.

A process beside a rank would share its core, and measure that. So the ranks measure themselves, at the end of a step, all
of them: nothing was measured when they began, and one is compared with the others.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

from unskew.analytics.health.probing import answer, side_by_side
from unskew.collector.command import Command, wrong_name
from unskew.collector.events import Control, Span
from unskew.collector.paths import Store, StoreError
from unskew.runtime.attach.asked.probe_file import PRODUCTS, read_probe, write_probe

WITHIN_S = 50.0
"""A rank that has not reached the end of a step by then is not waited for."""


class _ProbeRequest(NamedTuple):
    command: Command
    rank: int
    ranks: tuple[int, ...]
    until_s: float


class JobProbing:
    """Of one run, for its watcher."""

    def __init__(self, store: Store, run: str, *, on_gpu: bool) -> None:
        self._store, self._run, self._on_gpu = store, run, on_gpu
        self._asked: _ProbeRequest | None = None
        self._spans: list[Span] = []

    def ask(self, command: Command, ranks: Collection[int]) -> Control:
        """The answer to who asks for a probe: a note, or why there is none."""
        wrong = wrong_name(command.by) or self._refusal(command, ranks)
        if not wrong:
            try:
                write_probe(self._store, self._run, read_probe(self._store, self._run) + 1)
            except (OSError, StoreError) as error:
                wrong = f"the ranks could not be asked: {error}"
        if not wrong:
            self._asked = _ProbeRequest(command, int(command.target), tuple(sorted(ranks)), time.monotonic() + WITHIN_S)
            self._spans = []
        return answer(command, wrong)

    def measured(self, span: Span) -> None:
        """A rank has multiplied its matrix."""
        self._spans.append(span)

    def look(self, iteration: int, *, ended: bool = False) -> list[Control]:
        """The result, once every rank has answered; why there is none, when one has not in time."""
        if (asked := self._asked) is None:
            return []
        products: dict[int, list[int]] = {rank: [] for rank in asked.ranks}
        for span in self._spans:
            products.setdefault(span.rank, []).append(span.wall_us if span.compute_us is None else span.compute_us)
        silent = [rank for rank in asked.ranks if len(products[rank]) < PRODUCTS]
        if silent and not ended and time.monotonic() < asked.until_s:
            return []
        self._asked = None
        if not silent:
            walls = [sum(span.wall_us for span in self._spans if span.rank == rank) for rank in asked.ranks]
            if (found := side_by_side(products, [asked.rank], iteration, max(walls))) is not None:
                return [found]
        return [answer(asked.command, f"ranks {silent} reached no end of a step in which they could measure themselves")]

    def _refusal(self, command: Command, ranks: Collection[int]) -> str:
        if self._on_gpu:
            return "the ranks use GPUs: a product on the host says nothing of them"
        if command.target not in map(str, ranks):
            return f"rank {command.target} is not in the run, its ranks are {', '.join(map(str, sorted(ranks)))}"
        if len(ranks) < 2:
            return "one rank has nobody to be compared with, and nothing was measured when it began"
        return "a probe is under way" if self._asked is not None else ""
