"""Orders from times: dynamic list scheduling of one pipeline with split backward, any partition and placement (AdaPtis'
schedule step; section as restated by its simulator: ready work by priority B > F > W, admission capped by memory, work that
must wait a little is waited for).

A device that is free decides on what it knows then: chunks whose input has arrived, and chunks whose input is being computed,
with the time of its arrival. The rule:

1. a backward that is ready, else a forward that is ready and has room (with `forward_first` reversed);
2. else, if weights' gradients are pending: do one, unless a backward or forward arrives before `patience` of its time has
   passed, which is worth waiting for;
3. else wait for the next arrival.

Room: the activations kept on a device (from F to W) stay within its limit, and a forward leaves enough of it for one more
micro-batch in each later stage of the device, so that what has begun can always end.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf
from typing import Literal

import msgspec

from unskew.collector.events import ChunkKind

Step = tuple[ChunkKind, int, int]
"""(kind, stage, micro-batch)."""


class PipelineTask(msgspec.Struct, frozen=True):
    """One pipeline's stages: microseconds of F, B, W at their device's speed, activations kept (any unit), and the device."""

    f_us: Sequence[float]
    b_us: Sequence[float]
    w_us: Sequence[float]
    kept: Sequence[float]
    device: Sequence[int]
    n_devices: int
    micro_batches: int
    message_us: float = 0.0


class DispatchOptions(msgspec.Struct, frozen=True):
    """What the schedule step tunes. `limit`: most activations kept per device; `patience`: in units of the pending W's time;
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
    return _Dispatch(pipe, knobs).run()


class _Dispatch:
    def __init__(self, pipe: PipelineTask, knobs: DispatchOptions) -> None:
        self.pipe, self.knobs = pipe, knobs
        n_stages = len(pipe.device)
        self.last = n_stages - 1
        self.spent = {"F": pipe.f_us, "B": pipe.b_us, "W": pipe.w_us}
        self.arrived: dict[ChunkKind, list[list[float]]] = {
            "F": [[0.0] * pipe.micro_batches] + [[] for _ in range(self.last)],
            "B": [[] for _ in range(n_stages)],
            "W": [[] for _ in range(n_stages)],
        }
        self.begun: dict[ChunkKind, list[int]] = {"F": [0] * n_stages, "B": [0] * n_stages, "W": [0] * n_stages}
        # Later stages first: their micro-batches are nearer to their end.
        self.stages = [
            [stage for stage in reversed(range(n_stages)) if pipe.device[stage] == device] for device in range(pipe.n_devices)
        ]
        self.room_after = [
            sum(pipe.kept[later] for later in range(stage + 1, n_stages) if pipe.device[later] == pipe.device[stage])
            for stage in range(n_stages)
        ]
        self.kept = [0.0] * pipe.n_devices
        self.free_at = [0.0] * pipe.n_devices
        self.lists: list[list[Step]] = [[] for _ in range(pipe.n_devices)]
        self.events = [(0.0, device) for device in range(pipe.n_devices)]

    def run(self) -> DispatchResult:
        left = 3 * len(self.pipe.device) * self.pipe.micro_batches
        while self.events:
            now, device = heapq.heappop(self.events)
            if now < self.free_at[device]:
                continue
            chosen, at = self._choose(device, now)
            if chosen is not None:
                self._start(device, chosen, now)
                left -= 1
            elif at < inf:
                heapq.heappush(self.events, (at, device))
        return DispatchResult(inf if left else max(self.free_at), tuple(map(tuple, self.lists)))

    def _choose(self, device: int, now: float) -> tuple[tuple[ChunkKind, int] | None, float]:
        """(what to start now, -) or (None, when to look again: infinite = when something becomes known)."""
        backward, next_b = self._ready("B", device, now)
        forward, next_f = self._ready("F", device, now)
        if self.knobs.forward_first and forward is not None:
            return ("F", forward), now
        if backward is not None:
            return ("B", backward), now
        if forward is not None:
            return ("F", forward), now
        weights, _ = self._ready("W", device, now)
        soon = min(next_b, next_f)
        if weights is not None and soon - now >= self.knobs.patience * self.pipe.w_us[weights]:
            return ("W", weights), now
        return None, soon

    def _ready(self, kind: ChunkKind, device: int, now: float) -> tuple[int | None, float]:
        """(the stage whose next chunk of this kind goes first now, the next arrival of one that is not there yet)."""
        best, best_key, soon = None, (inf, inf), inf
        for stage in self.stages[device]:
            number = self.begun[kind][stage]
            arrivals = self.arrived[kind][stage]
            if number >= len(arrivals) or (kind == "F" and not self._has_room(stage)):
                continue
            if arrivals[number] > now:
                soon = min(soon, arrivals[number])
                continue
            key = self._turn(stage, number) if kind == "F" else (number, -stage)
            if best is None or key < best_key:
                best, best_key = stage, key
        return best, soon

    def _has_room(self, stage: int) -> bool:
        kept = self.kept[self.pipe.device[stage]] + self.pipe.kept[stage] + self.room_after[stage]
        return kept <= self.knobs.limit * (1 + 1e-9)

    def _turn(self, stage: int, number: int) -> tuple[float, float]:
        if self.knobs.turn == "latest":
            return (-stage, number)
        if self.knobs.turn == "groups":
            return (number // self.pipe.n_devices, stage)
        return (number, -stage)

    def _start(self, device: int, chosen: tuple[ChunkKind, int], now: float) -> None:
        kind, stage = chosen
        number = self.begun[kind][stage]
        self.begun[kind][stage] += 1
        self.lists[device].append((kind, stage, number))
        end = self.free_at[device] = now + self.spent[kind][stage]
        heapq.heappush(self.events, (end, device))
        if kind == "F":
            self.kept[device] += self.pipe.kept[stage]
            self._arrive("F" if stage < self.last else "B", min(stage + 1, self.last), device, now, end)
        elif kind == "B":
            self._arrive("W", stage, device, now, end)
            if stage > 0:
                self._arrive("B", stage - 1, device, now, end)
        else:
            # Released when W ends; the device decides again only then.
            self.kept[device] -= self.pipe.kept[stage]

    def _arrive(self, kind: ChunkKind, stage: int, source: int, now: float, end: float) -> None:
        target = self.pipe.device[stage]
        self.arrived[kind][stage].append(end if target == source else end + self.pipe.message_us)
        if target != source:
            heapq.heappush(self.events, (max(now, self.free_at[target]), target))
