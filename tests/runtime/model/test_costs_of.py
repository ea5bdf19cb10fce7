"""Layers as unequal as those of a real model, on ranks: predicted, searched for and moved by what they cost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.training.runtime_runs import SMALL, train

from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.model_profiles import MODELS
from unskew.collector.events import IterationJudged, PlanIssued, PlanScored, RunFinished, Verdict
from unskew.runtime.control.launch import prepared
from unskew.runtime.options import OptionsError, RunOptions
from unskew.runtime.placement import place

NEMOTRON = msgspec.structs.replace(
    SMALL,
    layers=16,
    costs_of="nemotron-h-8b",
    pp=4,
    dp=1,
    micro_batches=8,
    tokens=32,
    iterations=45,
    dtype="float32",
    profile="longer",
)


def test_a_model_named_gives_a_run_its_layers() -> None:
    """An embedding, 52 layers of three kinds, a head that costs as much as three; the same when it is asked again."""
    options = prepared(NEMOTRON)
    embedding, *layers, head = options.layer_weights
    assert (options.n_layers, len(layers), len(set(layers))) == (54, 52, 3)
    assert sum(options.layer_weights) == pytest.approx(54, abs=0.02)
    us = MODELS["nemotron-h-8b"].costs_us().sum(axis=0)
    assert head / layers[7] == pytest.approx(us[53] / us[8], rel=0.002)
    assert 0 < embedding < 0.02
    assert prepared(options) == options
    assert place(msgspec.structs.replace(options, pp=1, device="auto"), gpus=0).device == "sleep"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"costs_of": "gemma"}, "^--costs-of gemma is not known, allowed: .*nemotron-h-8b, .*gemma2-9b"),
        ({"layers": 8}, "^--layers 8 is not for --costs-of nemotron-h-8b, which has 52$"),
        ({"device": "real"}, "^--costs-of is what emulated devices take, allowed: with --device sleep, virtual or auto$"),
        ({"model": "a:b"}, "^--costs-of is not for --model, whose layers cost what was measured of them$"),
    ],
)
def test_where_nobody_can_take_those_costs_it_is_refused(asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(OptionsError, match=sentence):
        prepared(RunOptions(**{"costs_of": "nemotron-h-8b", "device": "virtual", **asked}))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.parametrize("schedule", ["1f1b", "searched"])
def test_a_slow_rank_gives_unequal_layers_away_as_predicted(schedule: str, tmp_path: Path) -> None:
    """Known to be slow, and under each plan that comes; what it saves is more than chance."""
    run = train(tmp_path, "slow:rank=1,factor=2,at=9", base=prepared(msgspec.structs.replace(NEMOTRON, schedule=schedule)))
    assert run.of(RunFinished)[-1].status == "done"
    (verdict,) = run.of(Verdict)
    assert (verdict.cause, [party.rank for party in verdict.culprits]) == ("slow_device", [1])
    plans = {one.plan_version: Plan.from_data(one.plan) for one in run.of(PlanIssued)}
    assert len(plans) > 1
    assert executed(plans[max(plans)], 1) < 0.8 * executed(plans[0], 1)
    known = [one for one in run.of(IterationJudged) if not 9 <= one.iteration <= verdict.at_iteration]
    judged = [one for one in known if one.predicted_us is not None]
    assert {one.plan_version for one in judged} == plans.keys()
    for one in judged:
        assert one.predicted_us == pytest.approx(one.measured_us, rel=0.01), one.iteration
    paid = [one.interval_s[0] for one in run.of(PlanScored) if one.interval_s is not None]
    assert paid
    assert min(paid) > 0


def executed(plan: Plan, rank: int) -> float:
    """How many mean layers of micro-batches an iteration has for it."""
    hops = [hop for route in plan.routes for hop in route.hops if rank in hop.ranks]
    return sum(plan.work_of(hop.first_layer, hop.n_layers) for hop in hops)
