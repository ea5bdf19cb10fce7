"""What an iteration takes under a plan, on the recent batches.

Replicas that are pipelines of their own are evaluated apart. Where all micro-batches are alike, as in simulated jobs, each
distinct one is evaluated once: a job of a thousand devices then costs hardly more than the replicas that differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from unskew.analytics.core.cost import Speeds
from unskew.analytics.core.plan import PASSES, Plan, Route
from unskew.analytics.pipeline.actions import separate_pipelines
from unskew.analytics.pipeline.dag import Array
from unskew.analytics.pipeline.prediction import LayerCosts, synced_us, timeline_of
from unskew.analytics.pipeline.schedule import build_schedule


class Price(msgspec.Struct, frozen=True):
    """`iteration_us` [iteration]; `last`: the replica that finishes last, in the mean."""

    iteration_us: Array
    last: int


class Pricing:
    """Prices plans of one schedule and remembers the pipelines that it has evaluated; `scheduled_actions`: how many so far."""

    def __init__(self, costs: LayerCosts, speeds: Speeds) -> None:
        self.costs, self.speeds, self.scheduled_actions = costs, speeds, 0
        self._alike = all(bool((work == work[:1, :1]).all()) for work in (costs.tokens, costs.sum_sq))
        self._known: dict[object, tuple[Array, int]] = {}

    def of(self, plan: Plan) -> Price:
        """The price of an iteration under `plan`, the end of the iteration included."""
        tied = self.costs.cost.sync is not None or self.costs.cost.cores is not None  # by sums of gradients, or by cores
        pipelines = None if tied else _apart(plan)
        ends = [self._whole(plan)] if pipelines is None else [self._pipeline(plan, routes) for routes in pipelines]
        _, last = max(ends, key=lambda end: float(end[0].mean()))
        latest_us = np.maximum.reduce([end_us for end_us, _ in ends])
        return Price(latest_us + self.costs.cost.end_us(plan), plan.role_of[last].replica)

    def _pipeline(self, plan: Plan, routes: Sequence[Route]) -> tuple[Array, int]:
        """When a pipeline of its own ends, and the rank that ends last."""
        ranks = sorted({rank for hop in routes[0].hops for rank in hop.ranks})
        if not self._alike:
            return self._evaluated(_alone(plan, routes, ranks), [route.micro_batch for route in routes])
        key = self._key(plan, routes, ranks)
        if key not in self._known:
            end_us, last = self._evaluated(_alone(plan, routes, ranks), [route.micro_batch for route in routes])
            self._known[key] = end_us, ranks.index(last)
        end_us, place = self._known[key]
        return end_us, ranks[place]

    def _whole(self, plan: Plan) -> tuple[Array, int]:
        return self._evaluated(plan, range(len(plan.routes)))

    def _evaluated(self, plan: Plan, micro_batches: Sequence[int]) -> tuple[Array, int]:
        chosen = list(micro_batches)
        costs = LayerCosts(self.costs.cost, self.costs.tokens[chosen], self.costs.sum_sq[chosen])
        schedule = build_schedule(plan)
        self.scheduled_actions += len(schedule.order)
        timeline = timeline_of(schedule, costs, self.speeds)
        finish_us = timeline.finish_us
        return synced_us(timeline, costs, self.speeds), max(finish_us, key=lambda rank: float(finish_us[rank].mean()))

    def _key(self, plan: Plan, routes: Sequence[Route], ranks: Sequence[int]) -> object:
        """Equal for pipelines that take the same time: ranks only by their order, with their speeds, classes and links."""
        cost, number = self.costs.cost, {rank: place for place, rank in enumerate(ranks)}
        who = tuple(
            (
                plan.role_of[rank].part,
                plan.role_of[rank].recompute,
                tuple(sorted(self.speeds.get(rank, {}).items())),
                cost.class_of.get(rank, ""),
            )
            for rank in ranks
        )
        path = tuple((hop.first_layer, hop.n_layers, tuple(number[rank] for rank in hop.ranks)) for hop in routes[0].hops)
        links = tuple(
            (number[one.sender], number[one.receiver], one.more_us)
            for one in cost.slow_links
            if one.sender in number and one.receiver in number
        )
        order = [
            tuple(value for role, value in zip(plan.roles, values, strict=False) if role.rank in number)
            for values in (plan.paces, plan.in_flight)
        ]
        return plan.schedule, plan.layer_weights, who, path, len(routes), links, *order


def _apart(plan: Plan) -> list[list[Route]] | None:
    """The replicas that are pipelines of their own, where the order of each is one that it has alone; else None."""
    if plan.orders or PASSES.get(plan.schedule) != 1:
        return None
    pipelines = separate_pipelines(plan)
    once = pipelines is not None and all(
        len({hop.rank for hop in routes[0].hops}) == len(routes[0].hops) for routes in pipelines
    )
    return pipelines if once else None


def _alone(plan: Plan, routes: Sequence[Route], ranks: Sequence[int]) -> Plan:
    """A pipeline as a plan of its own, its micro-batches counted from 0."""
    if len(routes) == len(plan.routes):
        return plan
    own = set(ranks)
    kept = [place for place, role in enumerate(plan.roles) if role.rank in own]
    return msgspec.structs.replace(
        plan,
        roles=tuple(plan.roles[place] for place in kept),
        routes=tuple(msgspec.structs.replace(route, micro_batch=m) for m, route in enumerate(routes)),
        paces=tuple(plan.paces[place] for place in kept) if plan.paces else (),
        in_flight=tuple(plan.in_flight[place] for place in kept) if plan.in_flight else (),
    )
