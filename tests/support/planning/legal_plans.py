"""Any legal plan, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from unskew.analytics.core.plan import Hop, Plan, Role, Route, validate


@st.composite
def legal_plans(draw):
    """Any legal plan: ranks hold any ranges, routes wander over any holders, so ranks may even send both ways."""
    n_layers = draw(st.integers(1, 8))
    ranges = draw(st.lists(st.tuples(st.integers(0, n_layers - 1), st.integers(1, n_layers)), min_size=0, max_size=5))
    ranges = [(0, n_layers), *((first, min(count, n_layers - first)) for first, count in ranges)]
    roles = tuple(
        Role(rank=rank, replica=draw(st.integers(0, 1)), stage=0, first_layer=first, n_layers=count)
        for rank, (first, count) in enumerate(ranges)
    )
    routes = []
    for micro_batch in range(draw(st.integers(1, 6))):
        hops, layer = [], 0
        while layer < n_layers:
            role = draw(st.sampled_from([role for role in roles if role.holds(layer, 1)]))
            end = draw(st.integers(layer + 1, role.end_layer))
            hops.append(Hop(first_layer=layer, n_layers=end - layer, ranks=(role.rank,)))
            layer = end
        routes.append(Route(micro_batch=micro_batch, replica=draw(st.integers(0, 1)), hops=tuple(hops)))
    plan = Plan(plan_version=0, n_layers=n_layers, schedule="1f1b", roles=roles, routes=tuple(routes))
    validate(plan)
    return plan
