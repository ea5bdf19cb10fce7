"""The bench of replicas: a return that stops the others for longer than an iteration misses its bar."""

from __future__ import annotations

import msgspec
import pytest
from support.training.made_up import committed
from support.training.runtime_runs import SMALL

from unskew.benchmarks.recovery.replicas import _stall, stalls_of, unequal
from unskew.benchmarks.runs import FinishedRun
from unskew.collector.events import PlanApplied, ReplicaStep, RunFinished
from unskew.runtime.control.summary import SummaryBuilder

S = 1_000_000


def run_that_took(seconds: dict[int, float], back_at: int) -> FinishedRun:
    """Iterations of a second each, save some; rank 0 ends with other bits than its peer."""
    events, now = [], 0.0
    for iteration in range(40):
        now += seconds.get(iteration, 1.0)
        events.append(committed(iteration, S, round((now - 1) * S)))
    plan = SMALL.first_plan()
    events.append(
        PlanApplied(plan_version=2, digest="", proposal="", iteration=back_at, reason="", plan=plan.to_data(), watermark=0)
    )
    for rank in plan.ranks:
        step = ReplicaStep(
            iteration=39, plan_version=2, attempt=0, rank=rank, replica=rank // 2, state="healthy", exchanged=True,
            committed=True, position=39, tokens=1, divisor=1, healthy=2, digest="other" if rank == 0 else "same",
        )  # fmt: skip
        events.append(step)
    options = msgspec.structs.replace(SMALL, iterations=40, recovery="ft-hsdp")
    summary = SummaryBuilder().summary("r", "virtual", 0, None, RunFinished(status="done", iterations=40))
    return FinishedRun(options=options, summary=summary, events=events, same_process=frozenset(), not_once=0, lost=0, doubled=0)


def test_what_the_others_wait_for_is_seen_and_too_long_a_return_misses_the_bar() -> None:
    run = run_that_took({14: 1.75, 25: 2.5}, back_at=25)
    stalls = stalls_of(run, 14)
    assert (stalls.death, stalls.back, stalls.iteration_s) == (pytest.approx(0.75), pytest.approx(1.5), pytest.approx(1.0))
    (found,) = _stall("a return", {"ft-hsdp": [stalls.back]}, {"ft-hsdp": [stalls]}, 1.0)
    assert (found.value, found.ok) == (pytest.approx(1.5), False)


def test_other_bits_are_seen() -> None:
    assert unequal(run_that_took({}, back_at=25)) == 1
