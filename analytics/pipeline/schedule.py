"""Plan -> ordered actions per rank, for any legal plan and each schedule.

| schedule | order | rule |
|---|---|---|
| gpipe | list scheduling | all forwards of a rank, then its backwards |
| 1f1b | canonical.py | rank d opens with P - d forwards, then one backward and one forward in turn |
| zb-h1 | list scheduling | the same bound, backward split: W fills what would be idle, kept activations as 1F1B's largest |
| interleaved | canonical.py | a loop: each rank has several ranges, groups of as many micro-batches as ranks |
| zb-v | canonical.py | there and back: rank 0 has the first and the last range |
| searched | the plan's own `orders` | what a planner found (planners/adaptis/) |

Orders are decided on unit costs, never on times, so that every process derives the same one. Where a plan does not have the
form that 1f1b, interleaved and zb-v need (a dead rank's micro-batches go elsewhere, counts that do not divide), its order
is found by list scheduling as well, with the rule of 1f1b or zb-h1; so is the order of a searched plan whose `orders` are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

import msgspec

from unskew.analytics.core.plan import Plan, PlanError, chunk_kinds
from unskew.analytics.pipeline.actions import Action, ActionKey, input_of
from unskew.analytics.pipeline.canonical import canonical_lists
from unskew.analytics.pipeline.dag import Chunks, chunks_from
from unskew.analytics.pipeline.list_scheduling import listed_order
from unskew.analytics.pipeline.notation import orders_of
from unskew.collector.events import CHUNK_KINDS


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """What each rank executes, in order. `order` holds all actions such that each comes after everything it needs.

    The members of a tensor-parallel group execute what its first rank does, together: in `order` it stands for all of them.
    """

    plan: Plan
    by_rank: dict[int, tuple[Action, ...]]
    order: tuple[Action, ...]

    @cached_property
    def chunks(self) -> Chunks:
        """The schedule as arrays, in the order of `order`."""
        at: dict[ActionKey, int] = {}
        last_of: dict[int, int] = {}
        rows = []
        for position, action in enumerate(self.order):
            source = input_of(action, len(self.plan.routes[action.micro_batch].hops))
            needs = last_of.get(action.rank, -1), -1 if source is None else at[source]
            rows.append((CHUNK_KINDS.index(action.kind), action.micro_batch, action.hop, action.rank, *needs))
            at[action.key] = last_of[action.rank] = position
        return chunks_from(rows)


@lru_cache(maxsize=64)
def build_schedule(plan: Plan) -> Schedule:
    """The schedule of a legal plan: a pure function, the same in every process. Raises `PlanError` for `orders` that cannot be
    executed."""
    lists = orders_of(plan) if plan.orders else canonical_lists(plan)
    order = listed_order(plan) if lists is None else merged(plan, lists)
    by_rank: dict[int, list[Action]] = {rank: [] for rank in plan.ranks}
    for action in order:
        by_rank[action.rank].append(action)
    for rank, team in plan.team_of.items():
        by_rank[rank] = by_rank[team[0]]
    return Schedule(plan, {rank: tuple(actions) for rank, actions in by_rank.items()}, tuple(order))


def merged(plan: Plan, lists: Mapping[int, Iterable[Action]]) -> list[Action]:
    """The ranks' lists as one order in which each action comes after what it needs: each rank executes as far as it can, and is
    woken by the input it waits for. Raises `PlanError` for lists that wait for each other, repeat an action or lack one."""
    waiting = {rank: iter(actions) for rank, actions in lists.items()}
    asleep: dict[ActionKey, Action] = {}
    done: set[ActionKey] = set()
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
        key = action.key
        if key in done:
            raise PlanError(f"rank {rank} executes {action.kind} of micro-batch {action.micro_batch}, hop {action.hop}, twice")
        order.append(action)
        done.add(key)
        if (woken := asleep.pop(key, None)) is not None:
            awake.append((woken.rank, woken))
        if (following := next(waiting[rank], None)) is not None and ready(following):
            awake.append((rank, following))
    due = len(chunk_kinds(plan.schedule)) * sum(len(route.hops) for route in plan.routes)
    if asleep:
        stuck = min(asleep.values(), key=lambda action: (action.rank, action.micro_batch))
        raise PlanError(
            f"the orders wait for each other: rank {stuck.rank} cannot start {stuck.kind} of micro-batch {stuck.micro_batch}, "
            f"hop {stuck.hop}"
        )
    if len(order) != due:
        raise PlanError(f"the orders have {len(order)} actions where the plan asks for {due}")
    return order
