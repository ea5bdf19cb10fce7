"""Devices of two classes, TP groups of several degrees: each has its own costs, and predictions stay right when layers move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.training.adaptation_loop import Loop
from support.training.runtime_runs import SMALL, light
from support.training.runtime_runs import train as train_live

from unskew.analytics.core.cost import HEALTHY, ChunkCost, CostModel, PlaceCost, Speeds
from unskew.analytics.core.device_profiles import ProfileError, profiles_of
from unskew.analytics.core.iteration import Chunk, CommittedIteration, IterationTelemetry, Transfer
from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.plan import Hop, Plan, Role, Route, validate
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.detector.options import EMULATED
from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.loop.adaptation import Adaptation
from unskew.analytics.loop.site import Site
from unskew.analytics.pipeline.prediction import durations_us, layer_costs, predict_iteration
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.predictor.fit import expected_us, fit
from unskew.analytics.shards.parts import parts_by
from unskew.collector.events import DeviceJoined, IterationJudged, PlanApplied, PredictorFitted, Verdict
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run

NEW = {
    "F": ChunkCost(layer_us=400.0, token_us=8.0, token2_us=0.006, head_us_per_token=12.0),
    "B": ChunkCost(layer_us=800.0, token_us=16.0, token2_us=0.012, head_us_per_token=24.0),
}
# No multiple of the new ones: more memory-bound, with slower attention.
OLD = {
    "F": ChunkCost(layer_us=600.0, token_us=9.0, token2_us=0.018, head_us_per_token=14.0),
    "B": ChunkCost(layer_us=1100.0, token_us=19.0, token2_us=0.036, head_us_per_token=30.0),
}
CLASSES = {"new": (0, 1, 2, 3), "old": (4, 5, 6, 7)}
TRUTH = CostModel(
    chunks=NEW, device_class="new", classes=CLASSES, others=(PlaceCost(device_class="old", tp=1, chunks=OLD),),
    message_us=100.0, iteration_end_us=20_000.0,
)  # fmt: skip
PLAN = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=8)


def works(random: np.random.Generator, n: int) -> tuple[Work, ...]:
    return tuple(work_of([int(x) for x in random.integers(20, 120, 3)]) for _ in range(n))


def chunks_of(
    plan: Plan,
    truth: CostModel,
    of: tuple[Work, ...],
    random: np.random.Generator,
    *,
    speeds: Speeds = HEALTHY,
    cv: float = 0.0,
) -> tuple[Chunk, ...]:
    """Every chunk of an iteration, on each of those who execute it."""
    return tuple(
        msgspec.structs.replace(bare, us=expected_us(truth, bare) / speeds.get(rank, {}).get(kind, 1.0) * float(noise))
        for route in plan.routes
        for hop in route.hops
        for rank in hop.ranks
        for kind in "FB"
        for noise in [np.exp(random.normal(0, cv))]
        for bare in [
            Chunk(rank, kind, hop.n_layers, hop.first_layer + hop.n_layers == plan.n_layers, of[route.micro_batch], 0.0,
                  len(hop.ranks))
        ]
    )  # fmt: skip


def train(
    n: int, *, plan: Plan = PLAN, first: int = 0, speeds: Speeds | None = None, truth: CostModel = TRUTH
) -> Iterator[IterationTelemetry]:
    random = np.random.default_rng([3, first])
    for now in range(first, first + n):
        of = works(random, len(plan.routes))
        chunks = chunks_of(plan, truth, of, random, speeds=speeds or {}, cv=0.01)
        yield IterationTelemetry(
            committed=CommittedIteration(
                iteration=now, plan_version=plan.plan_version, chunks=chunks, works=of,
                measured_us=predict_iteration(plan, of, truth, speeds or {}).iteration_us, log_complete=True,
                transfers=(Transfer(0, 1, 100.0),),
            ),
        )  # fmt: skip


def adaptation(classes: dict[str, tuple[int, ...]]) -> Loop:
    site = Site(
        origin=PLAN, iterations=500, layer_bytes=(10**6,) * 16, bytes_per_us=200.0, regroup_us=3e5, detector=EMULATED,
        truth_known=True, classes=classes,
    )  # fmt: skip
    return Loop(site)


def test_in_a_mixed_cluster_nobody_is_accused_of_being_old_and_a_slow_old_device_is_named_with_its_own_speed() -> None:
    loop = adaptation(CLASSES)
    healthy = [event for released in train(40) for event in loop.observe(released, PLAN).events]
    assert not [event for event in healthy if isinstance(event, Verdict)]
    slow = {5: {"F": 0.7, "B": 0.7}}
    events = [event for released in train(30, first=40, speeds=slow) for event in loop.observe(released, PLAN).events]
    verdict = next(event for event in events if isinstance(event, Verdict))
    assert [party.rank for party in verdict.culprits] == [5]
    assert verdict.speed["F"] == pytest.approx(0.7, abs=0.03)
    assert {event.culprits[0].rank for event in events if isinstance(event, Verdict)} == {5}


@pytest.mark.parametrize(("classes", "bound"), [(CLASSES, 0.01), ({}, 0.5)])
def test_a_repartition_is_predicted_before_it_was_ever_measured(classes: dict[str, tuple[int, ...]], bound: float) -> None:
    """Old devices lose layers, one of them gets the head that only new ones and another old one had; without classes the same
    prediction is off by more."""
    loop = adaptation(classes)
    for released in train(20):
        loop.observe(released, PLAN)
    moved = plan_from_partition(
        plan_version=1, n_layers=16, schedule="1f1b", members=[(0, 1, 2, 3), (4, 5, 7, 6)], layers=[(4, 4, 4, 4), (5, 5, 3, 3)],
        micro_batches=[5, 3],
    )  # fmt: skip
    assert loop.fitted is not None
    of = works(np.random.default_rng(9), len(moved.routes))
    errors = []
    for chunk in chunks_of(moved, TRUTH, of, np.random.default_rng(0)):
        errors.append(abs(expected_us(loop.fitted.model, chunk) / chunk.us - 1))
    predicted = predict_iteration(moved, of, loop.fitted.model).iteration_us
    apart = abs(predicted / predict_iteration(moved, of, TRUTH).iteration_us - 1)
    assert apart < bound
    assert (max(errors) < 0.03) == bool(classes)


def test_what_is_fitted_survives_the_log() -> None:
    loop = adaptation(CLASSES)
    events = [event for released in train(12) for event in loop.observe(released, PLAN).events]
    fitted = next(event for event in events if isinstance(event, PredictorFitted))
    again = msgspec.convert(msgspec.json.decode(msgspec.json.encode(fitted.model)), CostModel)
    assert loop.fitted is not None
    assert again == loop.fitted.model
    started = loop.now.started()
    like = Adaptation.like(msgspec.json.decode(msgspec.json.encode(started), type=type(started)))
    assert like == Adaptation.begin(loop.now.site)


def test_a_class_that_has_no_head_yet_borrows_it_in_proportion_and_one_that_has_nothing_else_tells_it_apart() -> None:
    """Old devices are 1.5 times as slow throughout; once they hold the first stages only, once the last one only."""
    old = {kind: cost.times(1.5) for kind, cost in NEW.items()}
    for held in ((4, 5), (6, 7)):
        classes = {"old": held, "new": tuple(rank for rank in range(8) if rank not in held)}
        truth = CostModel(
            chunks=NEW, device_class="new", classes=classes, others=(PlaceCost(device_class="old", tp=1, chunks=old),)
        )
        plan = plan_from_partition(
            plan_version=0, n_layers=16, schedule="1f1b", members=[(0, 1, 2, 3), (4, 5, 6, 7)], micro_batches=[4, 4],
            layers=[(5, 4, 4, 3), (5, 4, 3, 4)],
        )  # fmt: skip
        if held == (6, 7):  # the last stage alone
            plan = plan_from_partition(
                plan_version=0, n_layers=16, schedule="1f1b", members=[(0, 1, 2, 6), (4, 5, 3, 7)], micro_batches=[4, 4],
                layers=[(5, 4, 4, 3), (5, 4, 4, 3)],
            )  # fmt: skip
        random = np.random.default_rng(1)
        seen = [c for _ in range(10) for c in chunks_of(plan, truth, works(random, 8), random)]
        if held == (6, 7):  # a new device has executed the head before
            seen += [
                Chunk(3, kind, n, True, work, truth.chunk_us(kind, work, n, has_head=True))
                for kind in "FB" for n in (2, 3) for work in works(random, 10)
            ]  # fmt: skip
        model = fit(seen, classes).model
        for kind in "FB":
            for n, head in ((2, True), (6, False), (3, True)):
                chunk = Chunk(held[0], kind, n, head, work_of([90, 70]), 0.0)
                assert expected_us(model, chunk) == pytest.approx(expected_us(truth, chunk), rel=0.02)


def groups_of_two() -> Plan:
    """Two stages of two replicas, each executed by a TP group of two, but the last one by a single rank."""
    hops = {
        (d, s): Hop(first_layer=4 * s, n_layers=4, ranks=(4 * d + 2 * s, 4 * d + 2 * s + 1)) for d in (0, 1) for s in (0, 1)
    }
    hops[1, 1] = Hop(first_layer=4, n_layers=4, ranks=(6,))
    roles = tuple(
        Role(rank=rank, replica=d, stage=s, shard=shard, first_layer=hop.first_layer, n_layers=4, part=part)
        for (d, s), hop in hops.items()
        for shard, (rank, part) in enumerate(zip(hop.ranks, parts_by([1] * len(hop.ranks)), strict=True))
    )  # fmt: skip
    routes = tuple(Route(micro_batch=m, replica=m % 2, hops=(hops[m % 2, 0], hops[m % 2, 1])) for m in range(4))
    plan = Plan(plan_version=0, n_layers=8, schedule="1f1b", roles=roles, routes=routes)
    validate(plan)
    return plan


def test_each_tp_degree_has_its_own_coefficients_and_a_group_is_as_fast_as_its_slowest_member() -> None:
    """Two members need 0.6 of the time of one; rank 2 computes at half speed, so its mate's chunk takes as long as its own."""
    plan = groups_of_two()
    two = {kind: cost.times(0.6) for kind, cost in NEW.items()}
    truth = CostModel(chunks=NEW, others=(PlaceCost(device_class="", tp=2, chunks=two),))
    random = np.random.default_rng(2)
    seen = [c for _ in range(12) for c in chunks_of(plan, truth, works(random, 4), random, cv=0.005)]
    model = fit(seen).model
    assert {(model.device_class, model.tp), *((one.device_class, one.tp) for one in model.others)} == {("", 1), ("", 2)}
    work = work_of([200, 40])
    for tp in (1, 2):
        chunk = Chunk(0, "B", 3, True, work, 0.0, tp)
        assert expected_us(model, chunk) == pytest.approx(expected_us(truth, chunk), rel=0.02)
    # Of four members nothing is known: half of what two need.
    four, pair = (expected_us(model, Chunk(0, "F", 3, False, work, 0.0, tp)) for tp in (4, 2))
    assert four == pytest.approx(pair / 2)
    schedule = build_schedule(plan)
    of = works(random, 4)
    slow = durations_us(schedule, layer_costs([of], truth), {2: {"F": 0.5, "B": 0.5}})[:, 0]
    fast = durations_us(schedule, layer_costs([of], truth), {})[:, 0]
    ratios = {action.rank: a / b for action, a, b in zip(schedule.order, slow, fast, strict=True)}
    assert ratios == {0: 1.0, 2: 2.0, 4: 1.0, 6: 1.0}
    assert slow.shape == (len(schedule.order),)


def test_a_judged_iteration_of_a_mixed_cluster_shows_ratios_near_one() -> None:
    loop = adaptation(CLASSES)
    judged: list[IterationJudged] = [loop.observe(released, PLAN).judged for released in train(20)]
    last = judged[-1]
    assert {one.rank for one in last.ranks} == set(range(8))
    assert all(one.f == pytest.approx(1, abs=0.03) and one.b == pytest.approx(1, abs=0.03) for one in last.ranks)


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_run_on_two_kinds_of_device_accuses_the_slow_one_only_and_predicts_the_plan_that_follows(tmp_path: Path) -> None:
    """The second replica is a generation behind; one of its ranks turns slow, layers and micro-batches move."""
    options = light(msgspec.structs.replace(SMALL, layers=12, micro_batches=8, iterations=44))
    run = train_live(tmp_path, "slow:rank=3,factor=1.8,at=16", base=options, profile="steady,2-3=older")
    assert {party.rank for verdict in run.of(Verdict) for party in verdict.culprits} == {3}
    assert {event.rank: event.device_class for event in run.of(DeviceJoined)} == {
        0: "steady",
        1: "steady",
        2: "older",
        3: "older",
    }
    change = run.of(PlanApplied)[-1]
    assert change.plan_version > 0
    judged = [event for event in run.of(IterationJudged) if event.plan_version == change.plan_version and event.predicted_us]
    assert len(judged) > 10
    assert max(abs((event.predicted_us or 0) / event.measured_us - 1) for event in judged) < 0.005
    with open_store(run.store) as reader:
        log = load_run(reader, run.id)
    assert log.classes == {"older": (2, 3), "steady": (0, 1)}
    diagnosis = diagnose(log)
    assert {party.rank for verdict in diagnosis.verdicts for party in verdict.culprits if party.rank is not None} == {3}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steady,4=warp", "profile=warp is not known, allowed: steady, long-context, older"),
        ("steady,6-9=older", "ranks 6 to 9 are not among the run's, allowed: 0 to 7"),
        ("steady,older", "older is not understood, allowed: RANK=NAME or FIRST-LAST=NAME"),
    ],
)
def test_a_bad_mixture_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ProfileError, match=sentence):
        profiles_of(text, 8)
