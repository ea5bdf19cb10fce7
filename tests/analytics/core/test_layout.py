"""Layouts: their stages' shares of layers that cost differently."""

from __future__ import annotations

from unskew.analytics.core.layout import Layout, Pipeline, weighted


def test_a_replica_that_has_lost_all_its_ranks_stays_empty_where_layers_cost_differently() -> None:
    layout = Layout((Pipeline(0, ((0,), (1,)), (2, 2), 4), Pipeline(1, (), (), 0)))
    assert [one.layers for one in weighted(layout, (1, 1, 1, 3)).pipelines] == [(3, 1), ()]
