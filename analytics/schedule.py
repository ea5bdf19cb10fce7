"""Plan -> ordered actions per rank: 1F1B by list scheduling, for any legal plan.

An event-driven simulation with unit costs (F = layers, B = 2 x layers) decides the order, not the times. A rank that is free
starts one of the actions whose input has arrived, the lowest micro-batch first, within two rules:

* cap: of one replica at most `k` micro-batches are in flight at the k-th hop from the end of their route (1F1B's bound on
  activations). Below the cap a forward goes before a backward, at the cap only a backward is left: for a uniform plan this is
  exactly 1F1B. Backward first would be the same there, but was up to 17 % slower on uneven and rerouted plans;
* first in, first out: a rank takes the messages of one sender in the order in which they were sent, because NCCL has no tags.

The order is free of deadlock because the simulation itself has executed it. Should both rules block everything (only
possible when ranks forward to each other in both directions), the cap gives way: the first message can always be taken.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import msgspec

from unskew.analytics.plan import Plan


class Action(msgspec.Struct, frozen=True, gc=False):
    """One chunk of work: `kind` of micro-batch `micro_batch` at hop number `hop` of its route, executed by `rank`."""

    kind: Literal["F", "B"]
    micro_batch: int
    hop: int
    rank: int
    first_layer: int
    n_layers: int


class Needs(NamedTuple):
    """What must have ended before an action starts, as positions in `Schedule.order` (-1 = nothing).

    `before`: the previous action of its rank; `input`: the action whose output it takes; `crosses`: by a message between ranks.
    """

    before: int
    input: int
    crosses: bool


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """What each rank executes, in order. `order` holds all actions such that each comes after everything it needs."""

    plan: Plan
    by_rank: dict[int, tuple[Action, ...]]
    order: tuple[Action, ...]

    @cached_property
    def needs(self) -> tuple[Needs, ...]:
        """The edges of the schedule's DAG, one entry per action of `order`."""
        at: dict[tuple[str, int, int], int] = {}
        last_of: dict[int, int] = {}
        needs = []
        for position, action in enumerate(self.order):
            source = _input(action, len(self.plan.routes[action.micro_batch].hops))
            given = -1 if source is None else at[source]
            crosses = given >= 0 and self.order[given].rank != action.rank
            needs.append(Needs(last_of.get(action.rank, -1), given, crosses))
            at[action.kind, action.micro_batch, action.hop] = last_of[action.rank] = position
        return tuple(needs)


@lru_cache(maxsize=64)
def build_schedule(plan: Plan) -> Schedule:
    """The schedule of a legal plan: a pure function, the same in every process."""
    order = tuple(_Simulation(plan).run())
    by_rank = {rank: tuple(action for action in order if action.rank == rank) for rank in plan.ranks}
    return Schedule(plan, by_rank, order)


def _input(action: Action, n_hops: int) -> tuple[str, int, int] | None:
    """The action whose output this one takes; None for the start of a route."""
    if action.kind == "F":
        return ("F", action.micro_batch, action.hop - 1) if action.hop > 0 else None
    return ("B", action.micro_batch, action.hop + 1) if action.hop + 1 < n_hops else ("F", action.micro_batch, action.hop)


class _Simulation:
    """State of the list scheduler: inboxes of arrived inputs, micro-batches in flight, running actions."""

    def __init__(self, plan: Plan) -> None:
        self.routes = plan.routes
        self.order: list[Action] = []
        self.inboxes: dict[int, dict[tuple[str, int], deque[Action]]] = {rank: {} for rank in plan.ranks}
        self.in_flight: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.executors: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self.running: list[tuple[int, int, Action]] = []
        self.busy: set[int] = set()
        for route in plan.routes:
            for hop, leg in enumerate(route.hops):
                self.executors[route.replica, len(route.hops) - hop].add(leg.rank)
            self._arrive(self._action("F", route.micro_batch, 0), ("start", route.replica))

    def run(self) -> list[Action]:
        """All actions in the order in which they start."""
        now = 0
        self._start(now, set(self.inboxes))
        while self.running or self._force(now):
            now = self.running[0][0]
            awake: set[int] = set()
            while self.running and self.running[0][0] == now:
                awake |= self._finish(heapq.heappop(self.running)[2])
            self._start(now, awake)
        return self.order

    def _start(self, now: int, ranks: set[int]) -> None:
        """Let each of the free ranks start its best action, if it has one."""
        for rank in sorted(ranks - self.busy):
            heads = (queue[0] for queue in self.inboxes[rank].values() if queue)
            if best := min((action for action in heads if self._fits(action)), key=_urgency, default=None):
                self._execute(now, best)

    def _force(self, now: int) -> bool:
        """Nothing runs: let the most urgent message pass its cap; False when all work is done."""
        heads = (queue[0] for inbox in self.inboxes.values() for queue in inbox.values() if queue)
        if best := min(heads, key=_urgency, default=None):
            self._execute(now, best)
        return best is not None

    def _execute(self, now: int, action: Action) -> None:
        next(queue for queue in self.inboxes[action.rank].values() if queue and queue[0] is action).popleft()
        if action.kind == "F":
            self.in_flight[self._slot(action)] += 1
        self.busy.add(action.rank)
        self.order.append(action)
        heapq.heappush(self.running, (now + action.n_layers * (1 if action.kind == "F" else 2), action.rank, action))

    def _finish(self, action: Action) -> set[int]:
        """Hand the result on; the ranks that may now have something to start."""
        self.busy.discard(action.rank)
        awake = {action.rank}
        last = len(self.routes[action.micro_batch].hops) - 1
        if action.kind == "B":
            slot = self._slot(action)
            self.in_flight[slot] -= 1
            awake |= self.executors[slot]
            following = self._action("B", action.micro_batch, action.hop - 1) if action.hop > 0 else None
        elif action.hop < last:
            following = self._action("F", action.micro_batch, action.hop + 1)
        else:
            following = self._action("B", action.micro_batch, last)
        if following is not None:
            replica = self.routes[action.micro_batch].replica
            local = following.rank == action.rank
            self._arrive(following, (following.kind, replica) if local else ("from", action.rank))
            awake.add(following.rank)
        return awake

    def _arrive(self, action: Action, source: tuple[str, int]) -> None:
        self.inboxes[action.rank].setdefault(source, deque()).append(action)

    def _fits(self, action: Action) -> bool:
        return action.kind == "B" or self.in_flight[slot := self._slot(action)] < slot[1]

    def _slot(self, action: Action) -> tuple[int, int]:
        """(replica, hop counted from the end of the route, 1 = last): what the cap is counted for."""
        route = self.routes[action.micro_batch]
        return route.replica, len(route.hops) - action.hop

    def _action(self, kind: Literal["F", "B"], micro_batch: int, hop: int) -> Action:
        leg = self.routes[micro_batch].hops[hop]
        return Action(kind, micro_batch, hop, leg.rank, leg.first_layer, leg.n_layers)


def _urgency(action: Action) -> tuple[bool, int, int]:
    return action.kind == "B", action.micro_batch, -action.hop
