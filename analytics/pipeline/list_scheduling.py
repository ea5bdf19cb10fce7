"""The order of any legal plan by list scheduling: gpipe, zb-h1, and 1f1b where replicas do each other's work.

An event-driven simulation decides the order, with unit costs instead of times: F = layers, B = 2 x layers, or B = W = layers
where the backward pass is split, all times the rank's pace where the plan states paces. A rank that is free starts one of the
actions whose input has arrived, forwards first, then backwards, then weights, the lowest micro-batch first, within these rules:

* cap (1f1b, zb-h1): of one replica at most `k` micro-batches are in flight (F begun, B not ended) at the k-th hop from the end
  of their route, 1F1B's bound on activations. Below the cap a forward goes before a backward, at the cap only a backward is
  left: for a uniform plan this is exactly 1F1B. Backward first would be the same there, but was up to 17 % slower on uneven and
  rerouted plans;
  A plan may allow a rank more (`Plan.in_flight`);
* kept (zb-h1): activations are kept until W, of at most as many micro-batches as the route has hops (or as the plan allows). A
  rank does weights when it can do nothing else, which for a uniform plan is exactly ZB-H1: the first stage keeps what 1F1B's
  first stage keeps;
* gpipe has no cap; a rank begins its backwards when all its forwards are done;
* first in, first out: a rank takes the messages of one sender in the order in which they were sent, because NCCL has no tags.

The order is free of deadlock because the simulation itself has executed it. Should cap and order of messages block everything
(only possible when ranks forward to each other in both directions), the cap gives way: the first message can always be taken.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from unskew.analytics.core.plan import Plan, Route, splits_backward
from unskew.analytics.pipeline.actions import Action, action_of, separate_pipelines
from unskew.collector.events import CHUNK_KINDS, ChunkKind


def listed_order(plan: Plan) -> list[Action]:
    """All actions of the plan, each after what it needs; of one pipeline, in the order in which the simulation starts them.

    Replicas that are pipelines of their own with equal hops and equally many micro-batches are simulated once.
    """
    pipelines = separate_pipelines(plan)
    paces = {role.rank: pace for role, pace in zip(plan.roles, plan.paces, strict=False)}
    allowed = {role.rank: most for role, most in zip(plan.roles, plan.in_flight, strict=False) if most}
    if pipelines is None:
        return _ListScheduler({route.micro_batch: route for route in plan.routes}, plan.schedule, paces, allowed).run()
    order: list[Action] = []
    known: dict[tuple[object, ...], tuple[list[Route], list[Action]]] = {}
    for routes in pipelines:
        ranks = list(dict.fromkeys(hop.rank for hop in routes[0].hops))
        form = (
            len(routes),
            *((ranks.index(hop.rank), hop.n_layers, paces.get(hop.rank), allowed.get(hop.rank)) for hop in routes[0].hops),
        )
        if form not in known:
            own = {route.micro_batch: route for route in routes}
            known[form] = routes, _ListScheduler(own, plan.schedule, paces, allowed).run()
        model, actions = known[form]
        twin = {route.micro_batch: routes[number] for number, route in enumerate(model)}
        order += actions if model is routes else [action_of(twin[a.micro_batch], a.kind, a.hop) for a in actions]
    return order


class _ListScheduler:
    """State of the list scheduler: inboxes of arrived inputs, micro-batches in flight, running actions."""

    def __init__(
        self, routes: Mapping[int, Route], schedule: str, paces: Mapping[int, int], allowed: Mapping[int, int]
    ) -> None:
        self.routes, self.paces, self.allowed = routes, paces, allowed
        self.split, self.capped = splits_backward(schedule), schedule != "gpipe"
        self.order: list[Action] = []
        ranks = sorted({hop.rank for route in routes.values() for hop in route.hops})
        self.inboxes: dict[int, dict[tuple[str, int], deque[Action]]] = {rank: {} for rank in ranks}
        self.in_flight: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.kept: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.forwards: Counter[int] = Counter(hop.rank for route in routes.values() for hop in route.hops)
        self.executors: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self.running: list[tuple[int, int, Action]] = []
        self.busy: set[int] = set()
        for route in routes.values():
            for hop, leg in enumerate(route.hops):
                self.executors[route.replica, len(route.hops) - hop].add(leg.rank)
            self._arrive(action_of(route, "F", 0), ("start", route.replica))

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
            slot = self._slot(action)
            self.in_flight[slot] += 1
            self.kept[slot] += 1
            self.forwards[action.rank] -= 1
        self.busy.add(action.rank)
        self.order.append(action)
        units = 2 if action.kind == "B" and not self.split else 1
        units *= action.n_layers * self.paces.get(action.rank, 1)
        heapq.heappush(self.running, (now + units, action.rank, action))

    def _finish(self, action: Action) -> set[int]:
        """Hand the result on; the ranks that may now have something to start."""
        self.busy.discard(action.rank)
        awake = {action.rank}
        route = self.routes[action.micro_batch]
        slot = self._slot(action)
        if action.kind != "F":
            counted = self.in_flight if action.kind == "B" else self.kept
            counted[slot] -= 1
            awake |= self.executors[slot]
        if action.kind == "B" and self.split:
            self._arrive(action_of(route, "W", action.hop), ("W", route.replica))
        following = _following(route, action)
        if following is not None:
            local = following.rank == action.rank
            self._arrive(following, (following.kind, route.replica) if local else ("from", action.rank))
            awake.add(following.rank)
        return awake

    def _arrive(self, action: Action, source: tuple[str, int]) -> None:
        self.inboxes[action.rank].setdefault(source, deque()).append(action)

    def _fits(self, action: Action) -> bool:
        if action.kind == "F" and self.capped:
            slot = self._slot(action)
            most = self.allowed.get(action.rank, slot[1])
            room = not self.split or self.kept[slot] < max(most, len(self.routes[action.micro_batch].hops))
            return room and self.in_flight[slot] < most
        return self.capped or action.kind == "F" or self.forwards[action.rank] == 0

    def _slot(self, action: Action) -> tuple[int, int]:
        """(replica, hop counted from the end of the route, 1 = last): what the caps are counted for."""
        route = self.routes[action.micro_batch]
        return route.replica, len(route.hops) - action.hop


def _following(route: Route, action: Action) -> Action | None:
    """The action that takes this one's output to another hop; None at the end of the change back, and after W."""
    last = len(route.hops) - 1
    if action.kind == "F":
        kind: ChunkKind = "B" if action.hop == last else "F"
        return action_of(route, kind, min(action.hop + 1, last))
    return action_of(route, "B", action.hop - 1) if action.kind == "B" and action.hop > 0 else None


def _urgency(action: Action) -> tuple[int, int, int]:
    return CHUNK_KINDS.index(action.kind), action.micro_batch, -action.hop
