"""The plan a run begins with whose stages have tensor-parallel groups of the sizes that somebody asks for."""

from __future__ import annotations

from itertools import count, islice

import msgspec

from unskew.analytics.core.layout import Layout, Pipeline, check_enough, to_plan
from unskew.analytics.core.plan import Plan, stage_order_of
from unskew.analytics.core.sharing import share_out, split_work

Degrees = tuple[tuple[int, ...], ...]
"""[replica][stage]: how many ranks execute it as one."""


def plan_of_degrees(
    degrees: Degrees, *, n_layers: int, micro_batches: int, schedule: str = "1f1b", layer_weights: tuple[float, ...] = ()
) -> Plan:
    """The plan a run starts with whose stages are executed by so many ranks each, counted in that order: who has more ranks has
    as many times the layers and micro-batches. Raises `PlanError` for an impossible layout.

    >>> plan = plan_of_degrees(((2, 1), (1,)), n_layers=3, micro_batches=4)
    >>> [(role.rank, role.replica, role.stage, role.n_layers) for role in plan.roles]
    [(0, 0, 0, 2), (1, 0, 0, 2), (2, 0, 1, 1), (3, 1, 0, 3)]
    >>> [route.replica for route in plan.routes]
    [0, 0, 0, 1]
    """
    check_enough(max(map(len, degrees)), len(degrees), n_layers, micro_batches, schedule)
    ranks, pipelines = count(), []
    for replica, share in enumerate(share_out(micro_batches, [(0, 1 / sum(stages)) for stages in degrees])):
        groups = stage_order_of(schedule, [tuple(islice(ranks, degree)) for degree in degrees[replica]])
        layers = split_work(layer_weights or (1,) * n_layers, list(map(len, groups)))
        pipelines.append(Pipeline(replica, tuple(groups), tuple(layers), share))
    plan = to_plan(Layout(tuple(pipelines), schedule=schedule), n_layers)
    return msgspec.structs.replace(plan, layer_weights=layer_weights)
