"""Pipelines that share work, played event by event: 1F1B's rule instead of its fixed order, so that work may be rerouted.

A group that is free starts one of the chunks whose input has arrived: a forward while its home replica has fewer micro-batches
in flight at this stage than 1F1B allows (S - s), else a backward; the lowest micro-batch first. Groups are (replica, stage);
a micro-batch belongs to its home replica and is executed, stage by stage, by home or by whom its work was moved to.

Algorithm 1 of ResiHP (dp.py) looks on (`watch`) and moves work while this runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from unskew.analytics.core.layout import Move
from unskew.analytics.planners.problem import Floats

Chunk = tuple[int, int, int]
"""(micro-batch within its home, home replica, stage): a forward and its backward, which go together."""

Group = tuple[int, int]
"""(replica, stage)."""

INFINITE = float("inf")


class ReplicaSimulation:
    """`forward_us`, `backward_us` [replica, stage], inf for a dead group; `counts`: micro-batches per home replica.

    While it runs: `passed[d][s]` micro-batches of home d whose forward at stage s has ended, `held[d][s]` how many sets of
    activations group (d, s) holds, `begun` and `forwarded` the chunks whose forward has started and ended.
    """

    def __init__(
        self, forward_us: Floats, backward_us: Floats, counts: Sequence[int], moves: Iterable[Move], message_us: float
    ) -> None:
        self.lasts: tuple[list[list[float]], list[list[float]]] = (forward_us.tolist(), backward_us.tolist())
        self.counts = [int(count) for count in counts]
        self.stages = int(forward_us.shape[1])
        self.message_us = message_us
        self.now_us = 0.0
        self.passed, self.held, self._in_flight = (self._zeros() for _ in range(3))
        self.begun: set[Chunk] = set()
        self.forwarded: set[Chunk] = set()
        self._executor = {(j, move.source, move.stage): move.target for move in moves for j in move.micro_batches}
        self._helpers: dict[Group, set[Group]] = {}
        for (_, home, stage), target in self._executor.items():
            self._helpers.setdefault((home, stage), set()).add((target, stage))
        self._forwards: dict[Group, dict[int, list[int]]] = {}
        self._backwards: dict[Group, list[tuple[int, int]]] = {}
        self._busy: set[Group] = set()
        self._awake: set[Group] = set()
        self._events: list[tuple[float, int, bool, bool, Chunk]] = []
        self._n_events = 0
        self._ends_us = [0.0] * len(self.counts)

    def run(self, watch: Callable[[ReplicaSimulation], None] | None = None) -> list[float]:
        """Plays until nothing is left; the end of each home replica's work, inf where some of it could never run.

        `watch` is called at the start and after every instant at which something ended or arrived.
        """
        for home, count in enumerate(self.counts):
            for j in range(count):
                self._arrive(False, (j, home, 0))
        while True:
            if watch is not None:
                watch(self)
            awake, self._awake = sorted(self._awake - self._busy), set()
            for group in awake:
                self._start(group)
            if not self._events:
                break
            self.now_us = self._events[0][0]
            while self._events and self._events[0][0] == self.now_us:
                _, _, ended, backward, chunk = heapq.heappop(self._events)
                if ended:
                    self._end(backward, chunk)
                else:
                    self._arrive(backward, chunk)
        stuck = (home for home, count in enumerate(self.counts) if any(passed < count for passed in self.passed[home]))
        for home in stuck:
            self._ends_us[home] = INFINITE
        return self._ends_us

    def place(self, chunk: Chunk) -> Group:
        """The group that executes a chunk."""
        return self._executor.get(chunk, chunk[1]), chunk[2]

    def waiting(self, home: int, stage: int) -> int | None:
        """The lowest micro-batch of `home` whose input has arrived in its own group there and whose forward has not begun."""
        queue = self._forwards.get((home, stage), {}).get(home)
        return queue[0] if queue else None

    def move(self, chunk: Chunk, target: int) -> None:
        """Hand a chunk that has not begun to replica `target`; costs one message when its input has arrived already."""
        j, home, stage = chunk
        waiting = self._forwards.get(self.place(chunk), {}).get(home, [])
        self._executor[chunk] = target
        self._helpers.setdefault((home, stage), set()).add((target, stage))
        if j in waiting:
            waiting.remove(j)
            heapq.heapify(waiting)
            self._send(False, chunk)

    def _zeros(self) -> list[list[int]]:
        return [[0] * self.stages for _ in self.counts]

    def _arrive(self, backward: bool, chunk: Chunk) -> None:
        j, home, _ = chunk
        group = self.place(chunk)
        if backward:
            heapq.heappush(self._backwards.setdefault(group, []), (j, home))
        else:
            heapq.heappush(self._forwards.setdefault(group, {}).setdefault(home, []), j)
        self._awake.add(group)

    def _send(self, backward: bool, chunk: Chunk) -> None:
        if self.message_us:
            self._post(self.message_us, False, backward, chunk)
        else:
            self._arrive(backward, chunk)

    def _post(self, after_us: float, ended: bool, backward: bool, chunk: Chunk) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (self.now_us + after_us, self._n_events, ended, backward, chunk))

    def _start(self, group: Group) -> None:
        replica, stage = group
        if self.lasts[0][replica][stage] == INFINITE:
            return
        queues = self._forwards.get(group, {})
        cap = self.stages - stage
        heads = [(queue[0], home) for home, queue in queues.items() if queue and self._in_flight[home][stage] < cap]
        if heads:
            j, home = min(heads)
            heapq.heappop(queues[home])
            self._in_flight[home][stage] += 1
            self.held[replica][stage] += 1
            self.begun.add((j, home, stage))
            self._busy.add(group)
            self._post(self.lasts[0][replica][stage], True, False, (j, home, stage))
        elif backwards := self._backwards.get(group):
            j, home = heapq.heappop(backwards)
            self._busy.add(group)
            self._post(self.lasts[1][replica][stage], True, True, (j, home, stage))

    def _end(self, backward: bool, chunk: Chunk) -> None:
        j, home, stage = chunk
        group = self.place(chunk)
        self._busy.discard(group)
        self._awake.add(group)
        if backward:
            self._in_flight[home][stage] -= 1
            self.held[group[0]][stage] -= 1
            self._ends_us[home] = max(self._ends_us[home], self.now_us)
            self._awake.add((home, stage))
            self._awake |= self._helpers.get((home, stage), set())
            following = (j, home, stage - 1) if stage > 0 else None
        else:
            self.passed[home][stage] += 1
            self.forwarded.add(chunk)
            backward = stage + 1 == self.stages
            following = chunk if backward else (j, home, stage + 1)
        if following is None:
            return
        if self.place(following) == group:
            self._arrive(backward, following)
        else:
            self._send(backward, following)
