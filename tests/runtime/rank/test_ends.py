"""Embedding and output head as layers of their own: placed, moved and predicted like others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, assert_exact, train

from unskew.analytics.core.plan import Plan
from unskew.collector.events import IterationJudged, PlanIssued

pytestmark = [pytest.mark.limit(120), pytest.mark.slow]
APART = msgspec.structs.replace(SMALL, ends="apart", heads=2, layers=4, iterations=20)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"schedule": "1f1b"}, [range(4), range(4, 6)]),  # at this width the head costs more than a block
        ({"schedule": "zb-v", "layers": 2}, [[0, 3], [1, 2]]),  # the first rank has both ends, and no block
        ({"schedule": "1f1b", "pp": 1, "tp": 2}, [range(6), range(6)]),
    ],
)
def test_ends_of_their_own_cost_no_accuracy_and_are_predicted(
    options: dict[str, object], first: list[list[int] | range], tmp_path: Path
) -> None:
    """A rank dies: who is left executes its layers, with the same losses; its iterations are predicted within 1 %."""
    asked = msgspec.structs.replace(APART, **options)  # type: ignore[arg-type]
    run = train(tmp_path, "kill:rank=1,at=14", base=asked)
    assert_exact(run, undisturbed_losses(asked), {0, 2, 3})
    plan = Plan.from_data(run.of(PlanIssued)[0].plan)
    assert [[*plan.role_of[rank].layers] for rank in (0, 1)] == [[*layers] for layers in first]
    judged = [one for one in run.of(IterationJudged) if one.predicted_us is not None]
    assert judged
    for one in judged:
        assert one.predicted_us == pytest.approx(one.measured_us, rel=0.01)


def test_groups_exchange_for_ends_of_their_own_what_these_have(tmp_path: Path) -> None:
    """Over links that cost: after a death chunks are of other layers, and predicted as before."""
    asked = msgspec.structs.replace(APART, tp=2, heads=4, link_us=300, link_mbps=500)
    run = train(tmp_path, "kill:rank=1,at=14", base=asked)
    judged = [one for one in run.of(IterationJudged) if one.predicted_us is not None]
    assert {one.plan_version > 0 for one in judged} == {False, True}
    for one in judged:
        assert one.predicted_us == pytest.approx(one.measured_us, rel=0.01), one.iteration


def test_a_slow_rank_gives_up_an_end(tmp_path: Path) -> None:
    """The last rank has the head and a block; slow, it keeps less, and what moves arrives as it was."""
    asked = msgspec.structs.replace(APART, dp=1, micro_batches=8, iterations=40, profile="longer")
    run = train(tmp_path, "slow:rank=0,factor=2.5,at=10", base=asked)
    assert run.losses == pytest.approx(undisturbed_losses(asked), rel=0, abs=1e-8)
    plans = [Plan.from_data(one.plan) for one in run.of(PlanIssued)]
    held = [[*plan.role_of[0].layers] for plan in plans]
    assert held[0] == [0, 1, 2, 3]
    assert held[-1] in ([0], [0, 1]), held
