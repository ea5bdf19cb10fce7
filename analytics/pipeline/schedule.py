"""Plan -> ordered actions per rank, for any legal plan and each schedule.

| schedule | order | rule |
|---|---|---|
| gpipe | list scheduling | all forwards of a rank, then its backwards |
| 1f1b | canonical.py | rank d opens with P - d forwards, then one backward and one forward in turn |
| zb-h1 | list scheduling | the same bound, backward split: W fills what would be idle, kept activations as 1F1B's largest |
| interleaved | canonical.py | a loop: each rank has several ranges, groups of as many micro-batches as ranks |
| zb-v | canonical.py | there and back: rank 0 has the first and the last range |
| searched | the plan's own `orders` | what a planner found (planners/adaptis.py) |

Orders are decided on unit costs, never on times, so that every process derives the same one. Where a plan does not have the
form that 1f1b, interleaved and zb-v need (a dead rank's micro-batches go elsewhere, counts that do not divide), its order
is found by list scheduling as well, with the rule of 1f1b or zb-h1; so is the order of a searched plan whose `orders` are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import msgspec

from unskew.analytics.core.plan import Plan, PlanError, Route, splits_backward
from unskew.analytics.pipeline.chunks import Chunks, Ints, chunks_from

__all__ = ["Action", "Kind", "Needs", "Schedule", "action_of", "build_schedule", "input_of", "merged", "splits_backward"]

Kind = Literal["F", "B", "W"]


class Action(msgspec.Struct, frozen=True, gc=False):
    """One chunk of work: `kind` of micro-batch `micro_batch` at hop number `hop` of its route, executed by `rank`."""

    kind: Kind
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
            source = input_of(action, len(self.plan.routes[action.micro_batch].hops))
            given = -1 if source is None else at[source]
            crosses = given >= 0 and self.order[given].rank != action.rank
            needs.append(Needs(last_of.get(action.rank, -1), given, crosses))
            at[action.kind, action.micro_batch, action.hop] = last_of[action.rank] = position
        return tuple(needs)

    @cached_property
    def chunks(self) -> Chunks:
        """The schedule as arrays, in the order of `order`."""
        return chunks_from([(a.kind, a.micro_batch, a.hop, a.rank) for a in self.order], self.needs)

    @cached_property
    def chunks_and_messages(self) -> tuple[Chunks, Ints, Ints]:
        """`chunks.with_messages()`."""
        return self.chunks.with_messages()


def input_of(action: Action, n_hops: int) -> tuple[Kind, int, int] | None:
    """(kind, micro-batch, hop) of the action whose output this one takes; None for the start of a route."""
    if action.kind == "W":
        return ("B", action.micro_batch, action.hop)
    if action.kind == "F":
        return ("F", action.micro_batch, action.hop - 1) if action.hop > 0 else None
    return ("B", action.micro_batch, action.hop + 1) if action.hop + 1 < n_hops else ("F", action.micro_batch, action.hop)


def action_of(route: Route, kind: Kind, hop: int) -> Action:
    """The action of `kind` at a hop of a route."""
    leg = route.hops[hop]
    return Action(kind, route.micro_batch, hop, leg.rank, leg.first_layer, leg.n_layers)


@lru_cache(maxsize=64)
def build_schedule(plan: Plan) -> Schedule:
    """The schedule of a legal plan: a pure function, the same in every process. Raises `PlanError` for `orders` that cannot be
    executed."""
    from unskew.analytics.pipeline.canonical import canonical_lists  # noqa: PLC0415  (they build what is defined here
    from unskew.analytics.pipeline.list_scheduling import listed_order  # noqa: PLC0415
    from unskew.analytics.pipeline.notation import orders_of  # noqa: PLC0415

    lists = orders_of(plan) if plan.orders else canonical_lists(plan)
    order = listed_order(plan) if lists is None else merged(plan, lists)
    by_rank: dict[int, list[Action]] = {rank: [] for rank in plan.ranks}
    for action in order:
        by_rank[action.rank].append(action)
    return Schedule(plan, {rank: tuple(actions) for rank, actions in by_rank.items()}, tuple(order))


def merged(plan: Plan, lists: Mapping[int, Iterable[Action]]) -> list[Action]:
    """The ranks' lists as one order in which each action comes after what it needs: each rank executes as far as it can, and is
    woken by the input it waits for. Raises `PlanError` for lists that wait for each other, repeat an action or lack one."""
    waiting = {rank: iter(actions) for rank, actions in lists.items()}
    asleep: dict[tuple[Kind, int, int], Action] = {}
    done: set[tuple[Kind, int, int]] = set()
    order: list[Action] = []

    def ready(action: Action) -> bool:
        source = input_of(action, len(plan.routes[action.micro_batch].hops))
        if source is None or source in done:
            return True
        asleep[source] = action
        return False

    awake = [(action.rank, action) for rank in sorted(waiting) if (action := next(waiting[rank], None)) and ready(action)]
    while awake:
        rank, action = awake.pop()
        key = (action.kind, action.micro_batch, action.hop)
        if key in done:
            raise PlanError(f"rank {rank} executes {action.kind} of micro-batch {action.micro_batch}, hop {action.hop}, twice")
        order.append(action)
        done.add(key)
        if (woken := asleep.pop(key, None)) is not None:
            awake.append((woken.rank, woken))
        if (following := next(waiting[rank], None)) is not None and ready(following):
            awake.append((rank, following))
    kinds = 3 if splits_backward(plan.schedule) else 2
    due = kinds * sum(len(route.hops) for route in plan.routes)
    if asleep:
        stuck = min(asleep.values(), key=lambda action: (action.rank, action.micro_batch))
        raise PlanError(
            f"the orders wait for each other: rank {stuck.rank} cannot start {stuck.kind} of micro-batch {stuck.micro_batch}, "
            f"hop {stuck.hop}"
        )
    if len(order) != due:
        raise PlanError(f"the orders have {len(order)} actions where the plan asks for {due}")
    return order
