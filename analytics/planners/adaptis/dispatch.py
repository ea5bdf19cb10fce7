"""Orders from times: dynamic list scheduling of one pipeline with split backward, any partition and placement (AdaPtis'
schedule step; section as restated by its simulator: ready work by priority B > F > W, admission capped by memory, work that
must wait a little is waited for).

A device that is free decides on what it knows then: chunks whose input has arrived, and chunks whose input is being computed,
with the time of its arrival. The rule:

1. a backward that is ready, else a forward that is ready and has room (with `forward_first` reversed);
2. else, if weights' gradients are pending: do one, unless a backward or forward arrives before `patience` of its time has
   passed, which is worth waiting for;
3. else wait for the next arrival.

Room: what a device holds, and the activations kept on it (from F to W), stay within its limit, and a forward leaves enough of
it for one more micro-batch in each later stage of the device, so that what has begun can always end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Literal

import msgspec

from unskew.collector.events import CHUNK_KINDS, ChunkKind

Step = tuple[ChunkKind, int, int]
"""(kind, stage, micro-batch)."""
Waiting = tuple[int, int, int]
"""(micro-batch, hop, its place among what waits)."""
ROUNDING_US = 1e-3


class PipelineTask(msgspec.Struct, frozen=True):
    """One pipeline's stages: microseconds of F, B, W at their device's speed, activations kept (any unit), and the device;
    `held`: what each keeps all the time, () = nothing that counts."""

    f_us: Sequence[float]
    b_us: Sequence[float]
    w_us: Sequence[float]
    kept: Sequence[float]
    device: Sequence[int]
    n_devices: int
    micro_batches: int
    message_us: float = 0.0
    held: Sequence[float] = ()


class DispatchOptions(msgspec.Struct, frozen=True):
    """What the schedule step tunes. `limit`: the most kept per device; `patience`: in units of the pending W's time;
    `turn`: which of several ready forwards goes first: of the latest stage, in groups of as many micro-batches as devices
    stage by stage, or of the lowest micro-batch."""

    limit: float
    patience: float = 0.5
    forward_first: bool = False
    turn: Literal["latest", "groups", "lowest"] = "latest"


class DispatchResult(msgspec.Struct, frozen=True):
    """Makespan (infinite when the limit leaves no room) and each device's steps in order."""

    makespan_us: float
    lists: tuple[tuple[Step, ...], ...]


def dispatch(pipe: PipelineTask, knobs: DispatchOptions) -> DispatchResult:
    """The order that the rule gives, with its makespan as the evaluator also finds it."""
    rule = _Dispatch(pipe, knobs)
    return DispatchResult(rule.makespan_us(), tuple(map(tuple, rule.lists.values())))


class Legs(msgspec.Struct, frozen=True):
    """What a micro-batch passes, one entry per hop: who executes it, what it keeps there from F to W, the room there that it
    needs to begin, and what it takes by kind."""

    ranks: Sequence[int]
    kept: Sequence[float]
    room: Sequence[float]
    spent_us: Mapping[ChunkKind, Sequence[float]]


class DispatchRule(ABC):
    """The rule, for micro-batches that pass any legs; who derives from it keeps what waits."""

    def __init__(self, knobs: DispatchOptions, legs: Sequence[Legs], message_us: float, may_wait_us: dict[int, float]) -> None:
        self.knobs, self.legs, self.message_us = knobs, legs, message_us
        # How long a rank may still wait for others.
        self.may_wait_us = may_wait_us
        self.limit = knobs.limit * (1 + 1e-9)
        self.kinds: tuple[ChunkKind, ChunkKind] = ("F", "B") if knobs.forward_first else ("B", "F")
        self.free_at, self.kept = dict.fromkeys(may_wait_us, 0.0), dict.fromkeys(may_wait_us, 0.0)
        self.lists: dict[int, list[Step]] = {rank: [] for rank in may_wait_us}
        self.events = [(0.0, rank) for rank in sorted(may_wait_us)]

    @abstractmethod
    def _ready(self, kind: ChunkKind, rank: int, now: float) -> tuple[Waiting | None, float]:
        """(the chunk of this kind that goes first now, the next arrival of one that is not there yet and has room)."""

    @abstractmethod
    def _begin(self, kind: ChunkKind, rank: int, place: int) -> None:
        """What is there waits no more."""

    @abstractmethod
    def _await(self, kind: ChunkKind, number: int, hop: int, arrival: float) -> None:
        """It waits where it is executed."""

    def makespan_us(self) -> float:
        """When the last chunk ends; infinite where the limit leaves no room, or a rank waits longer than it may."""
        left = 3 * sum(len(legs.ranks) for legs in self.legs)
        events, free_at, may_wait_us = self.events, self.free_at, self.may_wait_us
        while events:
            now, rank = heappop(events)
            if now < free_at[rank]:
                continue
            kind, chosen, soon = self._choose(rank, now)
            if chosen is not None:
                left_us = may_wait_us[rank] = may_wait_us[rank] - (now - free_at[rank])
                if left_us < -ROUNDING_US:
                    break
                self._start(rank, kind, chosen, now)
                left -= 1
            elif soon < inf:
                heappush(events, (soon, rank))
        return inf if left else max(free_at.values())

    def _choose(self, rank: int, now: float) -> tuple[ChunkKind, Waiting | None, float]:
        """(kind, what to start now, when to look again if nothing: infinite = when something becomes known)."""
        first, second = self.kinds
        chosen, soon = self._ready(first, rank, now)
        if chosen is not None:
            return first, chosen, now
        chosen, arrival = self._ready(second, rank, now)
        if chosen is not None:
            return second, chosen, now
        soon = min(soon, arrival)
        chosen, _ = self._ready("W", rank, now)
        if chosen is not None and soon < inf:
            number, hop, _ = chosen
            if soon - now < self.knobs.patience * self.legs[number].spent_us["W"][hop]:
                return "W", None, soon
        return "W", chosen, soon

    def _turn(self, number: int, depth: int) -> tuple[int, ...]:
        """Of the forwards that are there the least goes first; `depth`: how far from the model's begin it is."""
        if self.knobs.turn == "latest":
            return -depth, number
        return (number // len(self.free_at), depth, number) if self.knobs.turn == "groups" else (number, -depth)

    def _start(self, rank: int, kind: ChunkKind, chosen: Waiting, now: float) -> None:
        number, hop, place = chosen
        self._begin(kind, rank, place)
        legs = self.legs[number]
        self.lists[rank].append((kind, hop, number))
        end = self.free_at[rank] = now + legs.spent_us[kind][hop]
        heappush(self.events, (end, rank))
        if kind == "F":
            self.kept[rank] += legs.kept[hop]
            if hop + 1 < len(legs.ranks):
                self._arrive("F", number, hop + 1, rank, now)
            else:
                self._await("B", number, hop, end)
        elif kind == "B":
            self._await("W", number, hop, end)
            if hop > 0:
                self._arrive("B", number, hop - 1, rank, now)
        else:
            # Released when W ends; the rank decides again only then.
            self.kept[rank] -= legs.kept[hop]

    def _arrive(self, kind: ChunkKind, number: int, hop: int, source: int, now: float) -> None:
        target, free_at = self.legs[number].ranks[hop], self.free_at
        if target == source:
            self._await(kind, number, hop, free_at[source])
        else:
            self._await(kind, number, hop, free_at[source] + self.message_us)
            heappush(self.events, (max(now, free_at[target]), target))


class _Dispatch(DispatchRule):
    """Of each stage the micro-batches come in order, so that only the next of each has to be looked at."""

    def __init__(self, pipe: PipelineTask, knobs: DispatchOptions) -> None:
        stages = range(len(pipe.device))
        room = [
            sum(pipe.kept[later] for later in stages[stage:] if pipe.device[later] == pipe.device[stage]) for stage in stages
        ]
        spent_us: dict[ChunkKind, Sequence[float]] = {"F": pipe.f_us, "B": pipe.b_us, "W": pipe.w_us}
        legs = [Legs(pipe.device, pipe.kept, room, spent_us)] * pipe.micro_batches
        super().__init__(knobs, legs, pipe.message_us, dict.fromkeys(range(pipe.n_devices), inf))
        for stage, held in enumerate(pipe.held):
            self.kept[pipe.device[stage]] += held
        self.room = room
        self.arrived: dict[ChunkKind, list[list[float]]] = {kind: [[] for _ in stages] for kind in CHUNK_KINDS}
        self.arrived["F"][0] = [0.0] * pipe.micro_batches
        self.begun: dict[ChunkKind, list[int]] = {kind: [0] * len(stages) for kind in CHUNK_KINDS}
        # Later stages first: their micro-batches are nearer to their end.
        self.stages = [[stage for stage in reversed(stages) if pipe.device[stage] == one] for one in range(pipe.n_devices)]

    def _ready(self, kind: ChunkKind, rank: int, now: float) -> tuple[Waiting | None, float]:
        best, soon = -1, inf
        best_turn: tuple[int, ...] = ()
        begun, arrived, room = self.begun[kind], self.arrived[kind], self.room
        left = self.limit - self.kept[rank] if kind == "F" else inf
        for stage in self.stages[rank]:
            number, arrivals = begun[stage], arrived[stage]
            if number >= len(arrivals) or room[stage] > left:
                continue
            if (arrival := arrivals[number]) > now:
                soon = min(soon, arrival)
                continue
            turn = self._turn(number, stage) if kind == "F" else (number, -stage)
            if best < 0 or turn < best_turn:
                best, best_turn = stage, turn
        return (begun[best], best, best) if best >= 0 else None, soon

    def _begin(self, kind: ChunkKind, rank: int, place: int) -> None:  # noqa: ARG002
        self.begun[kind][place] += 1

    def _await(self, kind: ChunkKind, number: int, hop: int, arrival: float) -> None:  # noqa: ARG002
        self.arrived[kind][hop].append(arrival)
