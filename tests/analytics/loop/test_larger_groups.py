"""A plan of larger groups whose exchange no chunk shows is left again, and such plans are not taken a second time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from support.training.adaptation_loop import Loop

from unskew.analytics.core.cost import CostModel, Speeds, speed_of
from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.iteration import Chunk, CommittedIteration, IterationTelemetry
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.loop.site import Site
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.collector.events import PredictorFitted, Regrouped

COST = profile("steady")
GROUPS = uniform_plan(tp=2, pp=2, dp=2, n_layers=16, micro_batches=8)
SITE = Site(origin=GROUPS, iterations=400, layer_bytes=(100_000,) * 16, bytes_per_us=200.0, regroup_us=300_000.0, units=4)
END_US = {2: 20_000, 4: 2_000_000}


def iteration(now: int, plan: Plan, speeds: Speeds, end_us: int) -> IterationTelemetry:
    """Of ranks at these speeds, with this end."""
    random = np.random.default_rng([11, now])
    works = tuple(work_of([int(x) for x in random.integers(20, 120, 3)]) for _ in plan.routes)
    chunks = []
    for route in plan.routes:
        for hop in route.hops:
            place, head = COST.place_of(hop.rank, len(hop.ranks)), hop.first_layer + hop.n_layers == plan.n_layers
            for kind in "FB":
                whole_us = COST.chunk_us(kind, works[route.micro_batch], hop.n_layers, has_head=head, place=place)
                chunks += [
                    Chunk(
                        rank, kind, hop.n_layers, head, works[route.micro_batch],
                        whole_us / speed_of(speeds, rank, kind) * float(random.uniform(0.99, 1.01)),
                        tp=len(hop.ranks),
                    )
                    for rank in hop.ranks
                ]  # fmt: skip
    took_us = predict_iteration(plan, works, COST, speeds).iteration_us + end_us
    return IterationTelemetry(
        committed=CommittedIteration(
            iteration=now, plan_version=plan.plan_version, chunks=tuple(chunks), works=works, measured_us=took_us,
            log_complete=True, transfers=(),
        )
    )  # fmt: skip


def trained(
    iterations: int, end_us: Callable[[int, Plan], int]
) -> tuple[Loop, Plan, list[tuple[int, int]], list[PredictorFitted]]:
    """Rank 2 turns slow in iteration 12, and what is proposed is applied: the loop and its plan then, when plans came with
    how large groups, and the fits."""
    loop, plan = Loop(SITE), GROUPS
    came, fits = list[tuple[int, int]](), list[PredictorFitted]()
    for now in range(iterations):
        speeds = {2: {"F": 0.5, "B": 0.5}} if now >= 12 else {}
        step = loop.observe(iteration(now, plan, speeds, end_us(now, plan)), plan)
        fits += [event for event in step.events if isinstance(event, PredictorFitted)]
        if step.proposal is not None:
            before, plan = plan, step.proposal.plan.renumbered(plan.plan_version + 1)
            came.append((now + 1, plan.widest))
            regrouped = Regrouped(
                plan_version=plan.plan_version, iteration=now + 1, seconds=0.3, migrate_seconds=0.1, moved_bytes=10**6
            )
            loop.now, _ = loop.now.applied(plan, f"p{len(came)}", regrouped, before=before, old=before)
    return loop, plan, came, fits


def test_a_plan_whose_iterations_end_late_is_left_again() -> None:
    """What larger groups exchange makes the end of an iteration longer; the log says so too."""
    loop, plan, came, fits = trained(140, lambda _now, plan: END_US[plan.widest])
    assert [widest for _, widest in came] == [4, 2], came
    (since, _), (until, _) = came
    assert until - since <= 25, came
    assert loop.fitted is not None
    assert loop.fitted.model.end_us(plan) < 0.1 * END_US[4]
    logged = msgspec.convert(msgspec.json.decode(msgspec.json.encode(fits[-1].model)), CostModel)
    assert dict(logged.end_more_us)[4] == pytest.approx(END_US[4] - END_US[2], rel=0.1)


def test_ends_that_become_later_for_all_sizes_are_no_reason_to_change_size() -> None:
    """Plans went from four members to two and back eight times in 400 iterations."""
    *_, came, _ = trained(400, lambda now, _plan: 20_000 + 2_000 * now)
    assert len(came) <= 3, came
