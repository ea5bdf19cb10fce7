"""The replica as the unit of failure (after FT-HSDP, arXiv 2602.00277): who trains on what when one is away.

A lost rank takes its whole replica out; the others keep their own layers and their own micro-batches, so the iteration is a
smaller one. Each replica draws its batches from a stream of its own. Its place in that stream moves when a step is committed to
which it contributed, and only then: a batch whose step it did not live to see is trained when it is back.

>>> from unskew.analytics.core.layout import uniform_plan
>>> first = uniform_plan(tp=1, pp=1, dp=2, n_layers=1, micro_batches=4)
>>> without = with_replicas(first, {1}, 7)
>>> without.ranks, [route.replica for route in without.routes]
((1,), [1, 1])
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from unskew.analytics.core.plan import Plan, PlanError

Positions = tuple[int, ...]
"""Of each replica of the run's first plan: how many batches of its stream are trained."""


def replicas_of(plan: Plan) -> tuple[int, ...]:
    """The replicas that have a part in the plan, ascending."""
    return tuple(sorted({role.replica for role in plan.roles}))


def with_replicas(first: Plan, replicas: Collection[int], plan_version: int) -> Plan:
    """What these `replicas` have in the run's `first` plan; micro-batches are counted through. Raises `PlanError` when none
    is left."""
    if not any(role.replica in replicas for role in first.roles):
        raise PlanError("no replica is whole any more: a checkpoint is needed to go on")
    routes = [route for route in first.routes if route.replica in replicas]
    return Plan(
        plan_version=plan_version,
        n_layers=first.n_layers,
        schedule=first.schedule,
        layer_weights=first.layer_weights,
        roles=tuple(role for role in first.roles if role.replica in replicas),
        routes=tuple(msgspec.structs.replace(route, micro_batch=number) for number, route in enumerate(routes)),
    )


def returning(first: Plan, plan: Plan, ready: Collection[int]) -> tuple[int, ...]:
    """Replicas without a part in `plan` all of whose ranks are `ready`, ascending."""
    away = {*replicas_of(first)} - {*replicas_of(plan)}
    return tuple(
        replica for replica in sorted(away) if all(role.rank in ready for role in first.roles if role.replica == replica)
    )


def micro_batches_of(first: Plan) -> dict[int, tuple[int, ...]]:
    """Replica -> its share of each batch: the numbers of its micro-batches in the first plan."""
    return {
        replica: tuple(route.micro_batch for route in first.routes if route.replica == replica)
        for replica in replicas_of(first)
    }


def trained(positions: Positions, contributors: Collection[int]) -> Positions:
    """After a committed step to which these replicas contributed their batches."""
    return tuple(position + (replica in contributors) for replica, position in enumerate(positions))
