"""Actions: what a rank executes, one chunk of work after the other; which takes whose output; which replicas stand alone."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.plan import Hop, Plan, Route
from unskew.collector.events import ChunkKind

ActionKey = tuple[ChunkKind, int, int]
"""(kind, micro-batch, hop): names an action of a plan."""


class Action(msgspec.Struct, frozen=True, gc=False):
    """One chunk of work: `kind` of micro-batch `micro_batch` at hop number `hop` of its route, executed by `rank`."""

    kind: ChunkKind
    micro_batch: int
    hop: int
    rank: int
    first_layer: int
    n_layers: int

    @property
    def key(self) -> ActionKey:
        return self.kind, self.micro_batch, self.hop


def input_of(action: Action, n_hops: int) -> ActionKey | None:
    """(kind, micro-batch, hop) of the action whose output this one takes; None for the start of a route."""
    if action.kind == "W":
        return ("B", action.micro_batch, action.hop)
    if action.kind == "F":
        return ("F", action.micro_batch, action.hop - 1) if action.hop > 0 else None
    return ("B", action.micro_batch, action.hop + 1) if action.hop + 1 < n_hops else ("F", action.micro_batch, action.hop)


def action_of(route: Route, kind: ChunkKind, hop: int) -> Action:
    """The action of `kind` at a hop of a route."""
    leg = route.hops[hop]
    return Action(kind, route.micro_batch, hop, leg.rank, leg.first_layer, leg.n_layers)


def separate_pipelines(plan: Plan) -> list[list[Route]] | None:
    """The routes of each replica; None when a replica's routes differ or a rank serves two replicas."""
    routes_of: dict[int, list[Route]] = {}
    hops_of: dict[int, tuple[Hop, ...]] = {}
    for route in plan.routes:
        routes_of.setdefault(route.replica, []).append(route)
        if hops_of.setdefault(route.replica, route.hops) != route.hops:
            return None
    ranks = [rank for hops in hops_of.values() for rank in {hop.rank for hop in hops}]
    return list(routes_of.values()) if len(ranks) == len(set(ranks)) else None
