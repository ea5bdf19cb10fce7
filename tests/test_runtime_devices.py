"""The devices that take real time: a slow rank is named, and the plan that follows is predicted well."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_runs import train

from unskew.collector.events import RunFinished, Verdict

pytestmark = pytest.mark.limit(120)


def test_on_the_real_device_a_slow_rank_is_named(tmp_path: Path) -> None:
    run = train(
        tmp_path, "slow:rank=1,factor=1.8,at=14", device="real", pp=2, dp=1, dim=64, heads=2, tokens=256, iterations=40,
        dtype="float32",
    )  # fmt: skip
    assert run.of(RunFinished)[-1].status == "done"
    verdict, *others = run.of(Verdict)
    assert (verdict.cause, [party.rank for party in verdict.culprits]) == ("slow_device", [1])
    assert 14 <= verdict.at_iteration < 34
    assert {other.verdict for other in others} <= {verdict.verdict}
    # Estimated from four iterations, on cores that the controller and everything else share.
    assert 0.35 < verdict.speed["F"] < 0.75
