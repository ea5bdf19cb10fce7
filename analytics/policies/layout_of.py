"""A plan of ranks as the layout that policies and simulator decide on."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec

from unskew.analytics.core.layout import PACE, Group, Layout, Pipeline, to_plan
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.scheduler.crews import crew_in


def layout_of(plan: Plan) -> Layout:
    """A plan as a layout; `routed` where pipelines alone do not say which ways its micro-batches take.

    >>> from unskew.analytics.core.layout import uniform_layout
    >>> layout = uniform_layout(tp=2, pp=2, replicas=range(2), n_layers=8, micro_batches=6)
    >>> layout_of(to_plan(layout, 8)) == layout
    True
    """
    rows: dict[int, list[tuple[int, int, Group]]] = defaultdict(list)
    for group in dict.fromkeys(hop.ranks for route in plan.routes for hop in route.hops):
        rows[plan.role_of[group[0]].replica] += [(first, n, group) for first, n in plan.role_of[group[0]].ranges]
    at = {role.rank: place for place, role in enumerate(plan.roles)}
    homes = Counter(route.replica if route.replica in rows else min(rows) for route in plan.routes)
    pipelines = []
    for replica in sorted(rows):
        stages, end = list[tuple[Group, int]](), 0
        for first, n, group in sorted(rows[replica]):
            stages += [((), first - end)] if first > end else []
            stages.append((group, n))
            end = first + n
        stages += [((), plan.n_layers - end)] if end < plan.n_layers else []
        groups = tuple(group for group, _ in stages)
        firsts = [at[group[0]] if group else None for group in groups]
        paces, in_flight = (
            tuple(usual if place is None else values[place] for place in firsts) if values else ()
            for values, usual in ((plan.paces, PACE), (plan.in_flight, 0))
        )
        shares = tuple(crew_in(plan, group).shares if group else () for group in groups)
        pipelines.append(
            Pipeline(
                replica,
                groups,
                tuple(n for _, n in stages),
                homes[replica],
                () if set(paces) == {PACE} else paces,
                in_flight if any(in_flight) else (),
                shares if any(shares) else (),
            )
        )
    layout = Layout(tuple(pipelines), schedule=plan.schedule)
    try:
        again = msgspec.structs.replace(to_plan(layout, plan.n_layers), layer_weights=plan.layer_weights)
    except PlanError:  # a stage that nobody of the replica serves, or two that share a layer
        return msgspec.structs.replace(layout, routed=plan)
    return layout if again.digest == plan.digest else msgspec.structs.replace(layout, routed=plan)
