"""The plan a run begins with whose stages have tensor-parallel groups of the sizes that somebody asks for."""

from __future__ import annotations

from itertools import count, islice
from math import ceil

import msgspec

from unskew.analytics.core.layout import Layout, Pipeline, check_enough, to_plan
from unskew.analytics.core.plan import Plan, split_evenly, stage_order_of
from unskew.analytics.core.sharing import share_out, split_work

Degrees = tuple[tuple[int, ...], ...]
"""[replica][stage]: how many ranks execute it as one."""


def plan_of_degrees(
    degrees: Degrees,
    *,
    units: int,
    n_layers: int,
    micro_batches: int,
    schedule: str = "1f1b",
    layer_weights: tuple[float, ...] = (),
) -> Plan:
    """The plan a run starts with whose stages are executed by so many ranks each, counted in that order. A layer is cut in
    whole ones of `units` (heads), as evenly as these allow; layers and micro-batches are dealt by how fast the member with
    most of them lets a group be. Raises `PlanError` for an impossible layout.

    >>> plan = plan_of_degrees(((3, 1), (1,)), units=4, n_layers=3, micro_batches=4)
    >>> [(role.rank, str(role.part), role.replica, role.stage, role.n_layers) for role in plan.roles[:3]]
    [(0, '0 to 1/4', 0, 0, 2), (1, '1/4 to 3/4', 0, 0, 2), (2, '3/4 to 1', 0, 0, 2)]
    >>> [route.replica for route in plan.routes]
    [0, 0, 0, 1]
    """
    check_enough(max(map(len, degrees)), len(degrees), n_layers, micro_batches, schedule)

    def pace(degree: int) -> float:
        return units / ceil(units / degree)

    ranks, pipelines = count(), []
    per_replica = share_out(micro_batches, [(0, 1 / sum(map(pace, stages))) for stages in degrees])
    for replica, (stages, share) in enumerate(zip(degrees, per_replica, strict=True)):
        groups = stage_order_of(schedule, [tuple(islice(ranks, degree)) for degree in stages])
        layers = split_work(layer_weights or (1,) * n_layers, [pace(len(group)) for group in groups])
        shares = tuple(tuple(split_evenly(units, len(group))) if units % len(group) else () for group in groups)
        pipelines.append(Pipeline(replica, tuple(groups), tuple(layers), share, shares=shares))
    plan = to_plan(Layout(tuple(pipelines), schedule=schedule), n_layers)
    return msgspec.structs.replace(plan, layer_weights=layer_weights)
