"""Probes in real processes: all ranks of one role turn slow alike and excuse each other, until they are measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runtime_runs import Run, train

from unskew.collector.events import PlanApplied, Probed, RunFinished, Span, Verdict, VerdictClosed

pytestmark = pytest.mark.slow

SLOW = (0, 2, 4)
FAULTS = tuple(f"slow:rank={rank},factor=1.6,at=30" for rank in SLOW)
LAYOUT = {"pp": 2, "dp": 3, "micro_batches": 6, "iterations": 60}


def named(run: Run) -> dict[int, Verdict]:
    """The devices that are accused."""
    assert run.of(RunFinished)[-1].status == "done"
    return {party.rank: verdict for verdict in run.of(Verdict) for party in verdict.culprits if party.rank is not None}


@pytest.mark.limit(240)
def test_ranks_that_excuse_each_other_are_probed_and_named(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTS, **LAYOUT)
    verdicts = named(run)
    assert sorted(verdicts) == list(SLOW)
    stage, *_ = run.of(Verdict)
    assert stage.cause == "stage_imbalance", "until they are measured, the stage is all that can be named"
    assert [closed.verdict for closed in run.of(VerdictClosed)] == [stage.verdict]
    (probed,) = run.of(Probed)
    assert probed.ranks == SLOW
    assert probed.slowdowns == {str(rank): pytest.approx(1.6, rel=0.01) for rank in SLOW}
    assert 30 < probed.at_iteration <= 50
    assert all(verdict.evidence["test"] == "probe" for verdict in verdicts.values())
    (applied,) = [event for event in run.of(PlanApplied) if event.reason.startswith("probe: ranks 0, 2, 4")]
    assert applied.digest == run.of(PlanApplied)[0].digest
    products = [event for event in run.of(Span) if event.kind == "probe" and event.plan_version == applied.plan_version]
    assert {span.rank for span in products} == set(SLOW)
    assert probed.cost_us == pytest.approx(max(sum(s.wall_us for s in products if s.rank == rank) for rank in SLOW))


def test_in_mode_observe_nothing_is_held_up_for_a_probe(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTS, mode="observe", **LAYOUT)
    assert run.of(Probed) == []
    assert len(run.of(PlanApplied)) == 1
