"""The joint search: never below its baselines, within its limits, timed by the evaluator, executable."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, light, train

from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.memory import peak_activations
from unskew.analytics.pipeline.model_profiles import MODELS
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.pipeline.schedule import build_schedule, evaluate, per_hop
from unskew.analytics.planners.adaptis.bound import busiest_device_us, lower_bound_us
from unskew.analytics.planners.adaptis.dispatch import DispatchOptions, PipelineTask, dispatch
from unskew.analytics.planners.adaptis.early import weights_early
from unskew.analytics.planners.adaptis.layouts import balanced, start_layouts, usual
from unskew.analytics.planners.adaptis.search import AdaptisSearch
from unskew.analytics.planners.adaptis.task import AdaptisTask, answer_of
from unskew.analytics.planners.adaptis.tune import BASELINES, gains, tune
from unskew.collector.events import IterationJudged, PlanApplied
from unskew.runtime.options import RunOptions


def task_of(name: str, devices: int = 4, micro_batches: int = 8, **changes: object) -> AdaptisTask:
    model = MODELS[name]
    facts = {"costs_us": model.costs_us(), "speeds": (1.0,) * devices, "micro_batches": micro_batches}
    return AdaptisTask(**{**facts, "kept": model.kept_bytes(), **changes})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_never_below_the_best_baseline_nor_beyond_the_bound(name):
    task = task_of(name)
    found = tune(task, evaluations=120)
    assert set(found.baselines_us) == set(BASELINES)
    assert found.makespan_us <= min(found.baselines_us.values())
    assert found.makespan_us >= found.bound_us
    assert gains(found)["interleaved"] > 1.1  # all have a large head, or unequal blocks


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(data=st.data(), devices=st.integers(1, 4), groups=st.integers(1, 3), message=st.integers(0, 2))
def test_every_answer_is_a_plan_whose_time_the_evaluator_confirms(data, devices, groups, message):
    units = data.draw(st.integers(devices, 12))
    costs = np.array(
        data.draw(st.lists(st.lists(st.integers(1, 9), min_size=units, max_size=units), min_size=3, max_size=3)), float
    )
    speeds = tuple(data.draw(st.lists(st.sampled_from([1.0, 0.5, 0.8]), min_size=devices, max_size=devices)))
    kept = np.array(data.draw(st.lists(st.integers(1, 5), min_size=units, max_size=units)), float)
    task = AdaptisTask(costs_us=costs, speeds=speeds, micro_batches=groups * devices, kept=kept, message_us=float(message))
    found = tune(task, evaluations=40)
    assert lower_bound_us(task) <= found.makespan_us + 1e-9
    assert found.makespan_us <= min(found.baselines_us.values()) + 1e-9
    plan = found.plan(replicas=2)
    schedule = build_schedule(plan)
    sums = np.add.reduceat(costs, [first for first, _ in found.layout.spans], axis=1)
    stages = sums / np.array([speeds[device] for device in found.layout.device])
    timeline = evaluate(schedule, per_hop(schedule.chunks, stages), task.message_us)
    assert float(timeline.makespan_us) == pytest.approx(found.makespan_us)
    stage_kept = np.array([kept[first:end].sum() for first, end in found.layout.spans])
    assert max(peak_activations(schedule.chunks, stage_kept).values()) == pytest.approx(found.kept_peak)
    assert len(plan.routes) == 2 * task.micro_batches


@pytest.mark.slow
@pytest.mark.limit(60)
@settings(deadline=None, max_examples=50)
@given(data=st.data(), devices=st.integers(1, 3), micro_batches=st.integers(1, 6), message=st.integers(0, 4))
def test_weights_go_early_and_nothing_ends_later_for_it(data, devices, micro_batches, message):
    units = data.draw(st.integers(devices, 8))
    costs = np.array(
        data.draw(st.lists(st.lists(st.integers(1, 9), min_size=units, max_size=units), min_size=3, max_size=3)), float
    )
    task = AdaptisTask(
        costs_us=costs, speeds=(1.0,) * devices, micro_batches=micro_batches, kept=np.ones(units), message_us=float(message)
    )
    layout = data.draw(st.sampled_from([*start_layouts(costs.sum(axis=0), task.speeds)]))
    patience, turn = data.draw(st.sampled_from([0.0, 1.0, 99.0])), data.draw(st.sampled_from(["latest", "groups", "lowest"]))
    found = AdaptisSearch(task, 1e9)._state(layout, DispatchOptions(1e9, patience=patience, turn=turn)).found
    before = answer_of(task, layout, found.lists)
    after = weights_early(task, before)
    assert after.makespan_us <= before.makespan_us * (1 + 1e-9)
    assert after.kept_peak <= before.kept_peak
    for early, late in zip(after.lists, before.lists, strict=True):
        assert sorted(early) == sorted(late)
        assert [step for step in early if step[0] != "W"] == [step for step in late if step[0] != "W"]
        places = [sum(number for number, step in enumerate(steps) if step[0] == "W") for steps in (early, late)]
        assert places[0] <= places[1]


def test_a_run_over_links_that_cost_is_searched_for_with_their_price():
    """And nothing is left to do behind the first stage's last backward pass but its own weights' gradients, beside which all
    other sums of gradients go on."""
    options = RunOptions(pp=2, dp=2, layers=16, micro_batches=8, schedule="searched", link_us=500, link_mbps=100)
    priced, free = (
        msgspec.structs.replace(options, link_us=us, link_mbps=mbps).first_plan() for us, mbps in ((500, 100), (0, 0))
    )
    assert priced.orders[0][-2:] == ("0I6", "0W6")
    cost = msgspec.structs.replace(profile("steady"), message_us=500.0, message_token_us=options.link_token_us)
    priced_us, free_us = (
        predict_iteration(plan, [Work(256, 256 * 256)] * 8, cost.split).iteration_us for plan in (priced, free)
    )
    assert priced_us < 0.99 * free_us


def test_the_search_of_a_small_task_ends_when_it_has_seen_everything():
    costs = np.arange(1.0, 10.0).reshape(3, 3)
    task = AdaptisTask(costs_us=costs, speeds=(1.0, 1.0), micro_batches=1, kept=np.ones(3))
    assert tune(task, evaluations=2500).evaluations >= 2500


def test_a_limit_on_activations_is_kept_and_an_impossible_one_refused():
    task = task_of("llama3-8b")
    free = tune(task, evaluations=60)
    tight = tune(task_of("llama3-8b", limit=0.6 * free.kept_peak), evaluations=60)
    assert tight.kept_peak <= 0.6 * free.kept_peak
    assert tight.makespan_us >= free.makespan_us
    with pytest.raises(PlanError, match="no order keeps what a device has"):
        tune(task_of("llama3-8b", limit=1.0), evaluations=20)
    with pytest.raises(PlanError, match="at least one unit per device"):
        tune(task_of("llama3-8b", devices=40), evaluations=20)


def test_a_cut_that_logits_or_parameters_alone_forbid_is_not_taken():
    """Four equal blocks and a head that costs as much as two: two devices, three units each but for what the head takes."""
    costs = np.array([[1.0, 1.0, 1.0, 1.0, 2.0]] * 3)
    facts = {"costs_us": costs, "speeds": (1.0, 1.0), "micro_batches": 4, "limit": 30.0}

    def devices(kept: list[float], held: tuple[float, ...]) -> tuple[set[int], float]:
        found = tune(AdaptisTask(**facts, kept=np.array(kept), held=held), evaluations=120)
        with_head = found.layout.device[-1]
        units = zip(found.layout.device, found.layout.spans, strict=True)
        assert found.kept_peak <= 30.0
        return {unit for device, (first, end) in units if device == with_head for unit in range(first, end)}, found.makespan_us

    free, free_us = devices([1.0] * 5, (1.0,) * 5)
    assert len(free) > 1
    by_logits, us = devices([1.0] * 4 + [28.0], (1.0,) * 5)
    assert by_logits == {4}
    assert us > free_us
    by_parameters, us = devices([1.0] * 5, (1.0,) * 4 + (28.0,))
    assert by_parameters == {4}
    assert us > free_us
    with pytest.raises(PlanError, match="no order keeps what a device has within 30"):
        devices([1.0] * 5, (1.0,) * 4 + (30.0,))


def test_uniform_stages_reach_the_known_optimum():
    """F = B = W = 1 on 4 devices: 3 M + the fill of the first stage, with the activations that 1F1B's first device keeps."""
    for device, fill in [((0, 1, 2, 3), 3.0), ((0, 1, 2, 3, 3, 2, 1, 0), 1.5)]:
        share = [4.0 / len(device)] * len(device)
        pipe = PipelineTask(share, share, share, share, device, 4, 16)
        assert (
            min(dispatch(pipe, DispatchOptions(limit=6.0, turn=turn)).makespan_us for turn in ("latest", "groups")) == 48 + fill
        )


def test_layouts_are_balanced_for_the_devices_they_lie_on():
    layout = balanced((0, 1, 2), np.ones(12), (1.0, 0.4, 1.0), (1.0, 1.0, 1.0))
    assert layout.sizes == (5, 2, 5)
    assert usual(34, 4) == (9, 8, 8, 9)
    for start in start_layouts(np.arange(1.0, 35.0), (1.0, 1.0, 0.5, 1.0)):
        assert sum(start.sizes) == 34
        assert min(start.sizes) >= 1
        assert set(start.device) == {0, 1, 2, 3}


@settings(deadline=None, max_examples=30)
@given(
    units=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    speeds=st.lists(st.sampled_from([0.5, 0.8, 1.0]), min_size=1, max_size=3),
)
def test_no_assignment_of_units_beats_the_bound_on_the_busiest_device(units, speeds):
    """Against all assignments; the integer program finds the best one."""
    best = min(
        max(sum(u for u, owner in zip(units, owners, strict=True) if owner == d) / speed for d, speed in enumerate(speeds))
        for owners in product(range(len(speeds)), repeat=len(units))
    )
    found = busiest_device_us(np.array(units, float), tuple(speeds), np.zeros(len(speeds)))
    assert found == pytest.approx(best, rel=1e-5)  # the solver calls 1e-6 an integer


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("nemotron-h-8b", 8.1),
        ("jamba-52b", 51.6),
        ("gemma2-9b", 10.16),
        ("deepseek-like", 671.0),
    ],
)
def test_a_profile_has_the_parameters_its_model_is_known_for(name, billions):
    """Published totals (Gemma's with its tied head counted twice, as a pipeline holds it)."""
    assert sum(unit.parameters for unit in MODELS[name].units()) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_tuned_plan_trains_what_1f1b_trains(tmp_path):
    """The search's own order, executed by real ranks that hold several ranges each: the same losses, also after a death."""
    run = train(
        tmp_path, "kill:rank=3,at=2", schedule="searched", pp=2, dp=2, layers=8, micro_batches=8, iterations=4
    )  # fmt: skip
    plain = msgspec.structs.replace(run.options, schedule="1f1b", faults=())
    assert run.losses == pytest.approx(undisturbed_losses(plain), abs=1e-8)
    first = Plan.from_data(run.of(PlanApplied)[0].plan)
    assert first.orders
    assert {role.rank for role in first.roles if role.more} == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_searched_run_is_as_fast_after_a_fault_as_before(tmp_path):
    """A slow phase on the virtual device: a plan searched for the slow rank, then the plan of the start again, to the digit."""
    job = light(msgspec.structs.replace(SMALL, layers=8, micro_batches=8, tokens=256, iterations=52, schedule="searched"))
    run = train(tmp_path, "slow:rank=3,factor=1.8,at=10,until=26", base=job, mode="auto")
    first, *changed = run.of(PlanApplied)
    assert [applied.digest for applied in changed][-1] == first.digest
    assert all((plan["schedule"] == "searched") == bool(plan["orders"]) for plan in (applied.plan for applied in changed))
    healed = [one for one in run.of(IterationJudged) if one.plan_version == changed[-1].plan_version and one.predicted_us]
    assert len(healed) >= 4
    assert [one.measured_us for one in healed] == pytest.approx([one.predicted_us for one in healed], rel=0.01)


@pytest.mark.slow
@pytest.mark.limit(120)
def test_lent_layers_train_what_1f1b_trains(tmp_path):
    """Single layers of single micro-batches on other ranks, executed by real ranks: the same losses, and the time predicted."""
    job = msgspec.structs.replace(SMALL, layers=8, micro_batches=8, iterations=24, schedule="searched")
    run = train(tmp_path, "slow:rank=3,factor=2,at=8", base=job, mode="auto")
    plan, last = Plan.from_data(run.of(PlanApplied)[-1].plan), run.of(IterationJudged)[-1]
    assert len({route.hops for route in plan.routes}) > 2  # more paths than replicas
    assert last.measured_us == pytest.approx(last.predicted_us, rel=0.01)
    plain = msgspec.structs.replace(run.options, schedule="1f1b", faults=())
    assert run.losses == pytest.approx(undisturbed_losses(plain), abs=1e-8)
