"""Action lists in torch.distributed.pipelining's notation, the exchange format: "2F0" = stage 2, forward, micro-batch 0.

A stage is a hop of the route; F, I, W and B are torch's letters: I = gradient of activations, W = of weights, B = both. One
list per rank (joined by commas, one line per rank, it is what torch's `_load_csv` reads for a plan of one replica).

>>> parse("2I10")
('I', 10, 2)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from unskew.analytics.core.plan import Plan, PlanError, splits_backward
from unskew.analytics.pipeline.actions import Action, action_of
from unskew.collector.events import ChunkKind

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def parse(text: str) -> tuple[str, int, int]:
    """(letter, micro-batch, stage) of an action. Raises `PlanError`."""
    found = _ACTION.fullmatch(text.strip())
    if found is None:
        raise PlanError(f'{text!r} is not an action, allowed is for example "2F0": stage 2, one of F, B, I, W, micro-batch 0')
    return found[2], int(found[3]), int(found[1])


def written(actions: Iterable[Action], *, split: bool) -> tuple[str, ...]:
    """A rank's actions in the notation; `split`: whether B is the gradient of activations alone."""
    return tuple(f"{a.hop}{'I' if split and a.kind == 'B' else a.kind}{a.micro_batch}" for a in actions)


def orders_of(plan: Plan) -> dict[int, list[Action]]:
    """The actions that a plan's `orders` ask for, per rank; `merged` checks that they are complete and can be executed.

    Raises `PlanError` for an action that the plan does not give to this rank, or of a kind that its schedule does not have.
    """
    if len(plan.orders) != len(plan.roles):
        raise PlanError(f"{len(plan.orders)} orders for {len(plan.roles)} roles: one order per role is needed")
    split = splits_backward(plan.schedule)
    return {
        role.rank: [_action(plan, role.rank, entry, split) for entry in order]
        for role, order in zip(plan.roles, plan.orders, strict=True)
    }


def with_orders(plan: Plan, by_rank: dict[int, Sequence[Action]]) -> Plan:
    """The plan with these actions as its `orders`, under the schedule "searched" (which splits the backward pass)."""
    orders = tuple(written(by_rank[role.rank], split=True) for role in plan.roles)
    return Plan(
        plan_version=plan.plan_version,
        n_layers=plan.n_layers,
        schedule="searched",
        roles=plan.roles,
        routes=plan.routes,
        orders=orders,
        layer_weights=plan.layer_weights,
    )


def _action(plan: Plan, rank: int, entry: str, split: bool) -> Action:
    letter, micro_batch, hop = parse(entry)
    kinds: dict[str, ChunkKind] = {"F": "F", "I": "B", "W": "W"} if split else {"F": "F", "B": "B"}
    if letter not in kinds:
        raise PlanError(f"rank {rank}: {entry} under schedule {plan.schedule}, allowed are the letters {', '.join(kinds)}")
    if micro_batch >= len(plan.routes) or hop >= len(plan.routes[micro_batch].hops):
        raise PlanError(f"rank {rank}: {entry} is not in the plan")
    action = action_of(plan.routes[micro_batch], kinds[letter], hop)
    if action.rank != rank:
        raise PlanError(f"rank {rank}: {entry} is executed by rank {action.rank}")
    return action
