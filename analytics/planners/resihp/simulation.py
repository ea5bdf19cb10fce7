"""Pipelines that share work, played event by event with the rules of list scheduling (pipeline/list_scheduling.py), at the
groups' own speeds: so work may be rerouted while it is played.

A group that is free starts one of the chunks whose input has arrived: a forward while its home replica has fewer micro-batches
in flight at this stage than 1F1B allows (S - s) and, where the backward pass is split, keeps activations of fewer than S; else
a backward; else weights' gradients; the lowest micro-batch first. Groups are (replica, stage); a micro-batch belongs to its
home replica and is executed, stage by stage, by home or by whom its work was moved to.

Algorithm 1 of ResiHP (dp.py) looks on (`watch`) and moves work while this runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from unskew.analytics.core.layout import Move
from unskew.analytics.planners.problem import Floats
from unskew.collector.events import CHUNK_KINDS

Chunk = tuple[int, int, int]
"""(micro-batch within its home, home replica, stage): a forward, its backward and weights' gradient, which go together."""

Group = tuple[int, int]
"""(replica, stage)."""

INFINITE = float("inf")
_NONE: Mapping[int, list[int]] = {}


class ReplicaSimulation:
    """`chunk_us` [kind, replica, stage] of F and B, or of F, B and W; inf for a dead group; `counts`: micro-batches per home
    replica.

    `dead[s][d]`: whether nobody is left there. While it runs: `passed[d][s]` micro-batches of home d whose forward at stage s
    has ended, `held[d][s]` how many sets of activations group (d, s) holds, `begun` and `forwarded` the chunks whose forward
    has started and ended.
    """

    def __init__(self, chunk_us: Floats, counts: Sequence[int], moves: Iterable[Move], message_us: float) -> None:
        self.lasts: list[list[list[float]]] = chunk_us.tolist()
        self.split = len(self.lasts) == len(CHUNK_KINDS)
        self.dead = np.isinf(chunk_us[0]).T.tolist()
        self.counts = [int(count) for count in counts]
        self.stages = int(chunk_us.shape[2])
        self.message_us = message_us
        self.now_us = 0.0
        self.passed, self.held, self._in_flight, self._kept = (self._zeros() for _ in range(4))
        self.begun: set[Chunk] = set()
        self.forwarded: set[Chunk] = set()
        self._executor = {(j, move.source, move.stage): move.target for move in moves for j in move.micro_batches}
        self._helpers: dict[Group, set[Group]] = {}
        for (_, home, stage), target in self._executor.items():
            self._helpers.setdefault((home, stage), set()).add((target, stage))
        self._forwards: dict[Group, dict[int, list[int]]] = {}
        self._others: tuple[dict[Group, list[tuple[int, int]]], ...] = ({}, {})
        self._awaited: list[set[int]] = [set() for _ in range(self.stages)]
        self._touched: set[int] = set()
        self._busy: set[Group] = set()
        self._awake: set[Group] = set()
        self._events: list[tuple[float, int, bool, int, Chunk]] = []
        self._n_events = 0
        self._ends_us = [0.0] * len(self.counts)

    def run(self, watch: Callable[[ReplicaSimulation], None] | None = None) -> list[float]:
        """Plays until nothing is left; the end of each home replica's work, inf where some of it could never run.

        `watch` is called at every instant at which something ended or arrived, once what could start then has started.
        """
        for home, count in enumerate(self.counts):
            for j in range(count):
                self._arrive(0, (j, home, 0))
        events = self._events
        while True:
            self._start_all()
            if watch is not None:
                watch(self)
                self._start_all()
            if not events:
                break
            self.now_us = now_us = events[0][0]
            while events and events[0][0] == now_us:
                _, _, ended, kind, chunk = heapq.heappop(events)
                if ended:
                    self._end(kind, chunk)
                else:
                    self._arrive(kind, chunk)
        stuck = (home for home, count in enumerate(self.counts) if any(passed < count for passed in self.passed[home]))
        for home in stuck:
            self._ends_us[home] = INFINITE
        return self._ends_us

    def place(self, chunk: Chunk) -> Group:
        """The group that executes a chunk."""
        return self._executor.get(chunk, chunk[1]), chunk[2]

    def waiting(self) -> list[tuple[int, dict[int, int]]]:
        """Per stage at which something happened since this was last asked, ascending: of each replica the lowest micro-batch
        whose input has arrived in its own group there and whose forward has not begun; without them stage and replica are
        absent."""
        touched, self._touched = sorted(self._touched), set()
        found = []
        for stage in touched:
            first = {home: queue[0] for home in self._awaited[stage] if (queue := self._forwards[home, stage][home])}
            self._awaited[stage] = {*first}
            if first:
                found.append((stage, first))
        return found

    def move(self, chunk: Chunk, target: int) -> None:
        """Hand a chunk that has not begun to replica `target`; costs one message when its input has arrived already."""
        j, home, stage = chunk
        self._touched.add(stage)
        waiting = self._forwards.get(self.place(chunk), {}).get(home, [])
        self._executor[chunk] = target
        self._helpers.setdefault((home, stage), set()).add((target, stage))
        if j in waiting:
            waiting.remove(j)
            heapq.heapify(waiting)
            self._send(0, chunk)

    def _zeros(self) -> list[list[int]]:
        return [[0] * self.stages for _ in self.counts]

    def _arrive(self, kind: int, chunk: Chunk) -> None:
        j, home, _ = chunk
        group = self.place(chunk)
        if kind:
            heapq.heappush(self._others[kind - 1].setdefault(group, []), (j, home))
        else:
            heapq.heappush(self._forwards.setdefault(group, {}).setdefault(home, []), j)
            if group[0] == home:
                self._awaited[group[1]].add(home)
                self._touched.add(group[1])
        self._awake.add(group)

    def _send(self, kind: int, chunk: Chunk) -> None:
        if self.message_us:
            self._post(self.message_us, False, kind, chunk)
        else:
            self._arrive(kind, chunk)

    def _post(self, after_us: float, ended: bool, kind: int, chunk: Chunk) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (self.now_us + after_us, self._n_events, ended, kind, chunk))

    def _start_all(self) -> None:
        if self._awake:
            awake, self._awake = sorted(self._awake - self._busy), set()
            for group in awake:
                self._start(group)

    def _start(self, group: Group) -> None:
        replica, stage = group
        if self.dead[stage][replica]:
            return
        first: tuple[int, int] | None = None
        in_flight, held, most = self._in_flight, self._kept, self.stages - stage
        for home, arrived in self._forwards.get(group, _NONE).items():
            room = arrived and in_flight[home][stage] < most and held[home][stage] < self.stages  # for one more of its own
            if room and (first is None or (arrived[0], home) < first):
                first = arrived[0], home
        if first is not None:
            j, home = first
            heapq.heappop(self._forwards[group][home])
            self._in_flight[home][stage] += 1
            self._kept[home][stage] += 1
            self.held[replica][stage] += 1
            self.begun.add((j, home, stage))
            self._touched.add(stage)
            self._execute(group, 0, (j, home, stage))
            return
        for kind, queues in enumerate(self._others, start=1):
            if queue := queues.get(group):
                self._execute(group, kind, (*heapq.heappop(queue), stage))
                return

    def _execute(self, group: Group, kind: int, chunk: Chunk) -> None:
        self._busy.add(group)
        self._post(self.lasts[kind][group[0]][group[1]], True, kind, chunk)

    def _end(self, kind: int, chunk: Chunk) -> None:
        j, home, stage = chunk
        group = self.place(chunk)
        self._busy.discard(group)
        self._awake.add(group)
        self._touched.add(stage)
        self._ends_us[home] = self.now_us  # which never falls
        if kind:
            self._in_flight[home][stage] -= kind == 1
            if kind == 2 or not self.split:
                self._kept[home][stage] -= 1
                self.held[group[0]][stage] -= 1
            self._awake.add((home, stage))
            self._awake |= self._helpers.get((home, stage), set())
        else:
            self.passed[home][stage] += 1
            self.forwarded.add(chunk)
        if kind == 1 and self.split:
            self._arrive(2, chunk)
        following: tuple[int, Chunk] | None = None
        if kind == 0:
            following = (1, chunk) if stage + 1 == self.stages else (0, (j, home, stage + 1))
        elif kind == 1 and stage > 0:
            following = 1, (j, home, stage - 1)
        if following is None:
            return
        if self.place(following[1]) == group:
            self._arrive(*following)
        else:
            self._send(*following)
