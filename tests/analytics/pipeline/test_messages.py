"""Messages that occupy their link, are on their way, or block their sender: against an execution, step by step."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.cost import ChunkCost, CostModel, SlowLink
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import PASSES
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.dag import Array, Chunks, Messages
from unskew.analytics.pipeline.prediction import predict_iteration, predict_iterations
from unskew.analytics.pipeline.schedule import pipeline_of


def executed(chunks: Chunks, us: Array, latency_us: Array, link_us: Array, *, blocking: bool) -> float:
    """When the last chunk ends, if ranks do what they can, one after the other, and hand their messages to links."""
    todo = {rank: deque(positions.tolist()) for rank, positions in chunks.rank_positions()}
    takers = {int(chunks.given[taker]): int(taker) for taker in np.flatnonzero(chunks.crosses)}
    free: dict[int, float] = defaultdict(float)
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    there = {-1: 0.0}
    arrived: dict[int, float] = {}
    while any(todo.values()):
        for rank, queue in todo.items():
            while queue:
                chunk = queue[0]
                given = int(chunks.given[chunk])
                crosses = bool(chunks.crosses[chunk])
                if (chunk not in arrived) if crosses else (given not in there):
                    break
                queue.popleft()
                end = max(free[rank], arrived[chunk] if crosses else there[given]) + us[chunk]
                free[rank] = there[chunk] = end
                if (taker := takers.get(chunk)) is not None:
                    link = rank, int(chunks.rank[taker])
                    link_free[link] = max(end, link_free[link]) + link_us[taker]
                    arrived[taker] = link_free[link] + latency_us[taker]
                    if blocking:
                        free[rank] = arrived[taker]
    return max(there.values())


@settings(max_examples=60, deadline=None)
@given(schedule=st.sampled_from(sorted(PASSES)), shape=st.sampled_from([(2, 4), (4, 8), (3, 6)]), blocking=st.booleans(),
       occupies=st.booleans(), seed=st.integers(0, 10**6))  # fmt: skip
def test_the_evaluator_prices_messages_as_ranks_and_links_execute_them(
    schedule: str, shape: tuple[int, int], blocking: bool, occupies: bool, seed: int
) -> None:
    chunks = pipeline_of(schedule, ranks=shape[0], micro_batches=shape[1])
    random = np.random.default_rng(seed)
    us, latency_us, link_us = random.uniform(0, 2, (3, len(chunks)))
    link_us *= occupies
    expected = executed(chunks, us, latency_us, link_us, blocking=blocking)
    messages = Messages(latency_us, link_us, blocking)
    assert float(chunks.makespan_us(us, messages)) == pytest.approx(expected)
    _, end = chunks.run(np.stack([us, us], axis=1), messages)  # with a further axis, level by level
    assert end.max(axis=0) == pytest.approx([expected, expected])


def test_a_slow_link_costs_its_own_messages_and_each_iteration_its_own_tokens() -> None:
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=2, micro_batches=1)
    forward = ChunkCost(layer_us=10.0, token_us=0.0, token2_us=0.0)
    cost = CostModel(
        chunks={"F": forward, "B": forward.times(2)},
        message_us=1.0, message_token_us=0.5, slow_links=(SlowLink(0, 1, 100.0), SlowLink(5, 6, 1e6)),
    )  # fmt: skip
    batches = [[Work(4, 16)], [Work(8, 64)]]
    assert predict_iterations(plan, batches, cost).tolist() == [60 + 2 * (1 + 2) + 100, 60 + 2 * (1 + 4) + 100]
    assert predict_iteration(plan, batches[1], cost).iteration_us == 170
