"""The order of each schedule: exact makespans, torch's own orders, the bound on activations, any legal plan."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning.legal_plans import legal_plans

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import PASSES, Plan, PlanError, splits_backward
from unskew.analytics.pipeline.memory import peak_activations
from unskew.analytics.pipeline.notation import parse, with_orders, written
from unskew.analytics.pipeline.schedule import build_schedule, evaluate, per_hop, pipeline_of


def unit_makespan(name: str, ranks: int, micro_batches: int, units: tuple[float, float, float] = (1, 1, 1)) -> float:
    """Chunk times per rank and micro-batch are `units`, shared among the ranges of a rank."""
    chunks = pipeline_of(name, ranks=ranks, micro_batches=micro_batches)
    f, b, w = (part / PASSES[name] for part in units)
    costs = np.array([f, b, w] if splits_backward(name) else [f, b + w])
    return float(chunks.makespan_us(per_hop(chunks, np.tile(costs[:, None], ranks * PASSES[name]))))


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "whole", "split"), [(4, 8, 33, 27), (8, 8, 45, 31), (2, 4, 15, 13)], ids=["4x8", "8x8", "2x4"]
)
def test_the_known_makespans(ranks, micro_batches, whole, split):
    assert unit_makespan("1f1b", ranks, micro_batches) == whole
    assert unit_makespan("gpipe", ranks, micro_batches) == whole
    assert unit_makespan("zb-h1", ranks, micro_batches) == split


@settings(deadline=None, max_examples=25)
@given(ranks=st.integers(1, 6), extra=st.integers(0, 8), f=st.integers(1, 4), b=st.integers(1, 4), w=st.integers(1, 4))
def test_the_formulas_hold_for_uniform_costs(ranks, extra, f, b, w):
    m = 2 * ranks + extra
    assert unit_makespan("1f1b", ranks, m, (f, b, w)) == pytest.approx((m + ranks - 1) * (f + b + w))
    if f == b and w <= b:
        assert unit_makespan("zb-h1", ranks, m, (f, b, w)) == pytest.approx(m * (f + b + w) + (ranks - 1) * (f + b - w))
    if f == b == w:
        assert unit_makespan("zb-v", ranks, m, (f, b, w)) == pytest.approx(m * 3 * f + (ranks - 1) * f / 2)
    groups = ranks * -(-m // ranks)
    fill = (ranks - 1) * (f + b + w) / 2
    assert unit_makespan("interleaved", ranks, groups, (f, b, w)) == pytest.approx(groups * (f + b + w) + fill)


def test_activations_kept_are_what_each_schedule_promises():
    ranks, micro_batches = 4, 12

    def peaks(name: str) -> list[float]:
        chunks = pipeline_of(name, ranks=ranks, micro_batches=micro_batches)
        return list(peak_activations(chunks, np.ones(ranks * PASSES[name])).values())

    assert peaks("gpipe") == [12, 12, 12, 12]
    assert peaks("1f1b") == [4, 3, 2, 1]
    assert max(peaks("zb-h1")) == 4
    assert peaks("interleaved") == [11, 9, 7, 5]  # (V-1) P + 2 (P-d-1) + 1 half-ranges
    assert peaks("zb-v") == [8, 8, 8, 8]  # 2 P half-ranges


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 12), (3, 6)])
def test_torchs_own_orders_are_ours(ranks, micro_batches):
    """torch.distributed.pipelining builds the same lists; for ZB-V ours must not be slower."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

    def theirs(kind: str, stages: int) -> list[list[tuple[str, int, int]]]:
        made = object.__new__(getattr(schedules, kind))
        made.pp_group_size, made._n_microbatches, made.n_local_stages = ranks, micro_batches, stages
        made.stage_index_to_group_rank = {h: min(h, 2 * ranks - 1 - h) for h in range(2 * ranks)}
        made.number_of_rounds = max(1, micro_batches // ranks)
        made.microbatches_per_round = micro_batches // made.number_of_rounds
        made.num_stages = 2 * ranks
        lists = []
        for rank in range(ranks):
            actions = made._calculate_single_rank_operations(rank)
            lists.append([parse(repr(action)) for action in actions if action is not None])
        return lists

    mine = pipeline_lists("interleaved", ranks, micro_batches)
    assert [[("B" if k == "I" else k, m, s) for k, m, s in rank] for rank in mine] == theirs("ScheduleInterleaved1F1B", 2)
    ours = pipeline_lists("zb-v", ranks, micro_batches)
    assert [sorted(rank) for rank in ours] == [sorted(rank) for rank in theirs("ScheduleZBVZeroBubble", 2)]
    assert unit_makespan("zb-v", ranks, micro_batches) <= torch_makespan(theirs("ScheduleZBVZeroBubble", 2), ranks) / 2


def pipeline_lists(name: str, ranks: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    plan = uniform_plan(tp=1, pp=ranks, dp=1, n_layers=ranks * PASSES[name], micro_batches=micro_batches, schedule=name)
    schedule = build_schedule(plan)
    split = splits_backward(name)
    return [[parse(text) for text in written(schedule.by_rank[rank], split=split)] for rank in range(ranks)]


def torch_makespan(lists: list[list[tuple[str, int, int]]], ranks: int) -> float:
    """Unit chunks in torch's ZB-V order, as a searched plan of ours."""
    plan = uniform_plan(
        tp=1, pp=ranks, dp=1, n_layers=2 * ranks, micro_batches=1 + max(m for _, m, _ in lists[0]), schedule="zb-v"
    )
    orders = tuple(tuple(f"{stage}{kind}{m}" for kind, m, stage in rank) for rank in lists)
    searched = Plan(
        plan_version=0, n_layers=plan.n_layers, schedule="searched", roles=plan.roles, routes=plan.routes, orders=orders
    )
    schedule = build_schedule(searched)
    return float(evaluate(schedule, np.ones(len(schedule.order))).makespan_us)


@settings(deadline=None, max_examples=60)
@given(plan=legal_plans(), name=st.sampled_from(["gpipe", "zb-h1", "interleaved", "zb-v"]), data=st.data())
def test_any_legal_plan_runs_under_any_schedule(plan, name, data):
    """Every (layer, micro-batch) once per kind, F before B before W, no rank does two things at once, the bounds hold."""
    plan = Plan(plan_version=0, n_layers=plan.n_layers, schedule=name, roles=plan.roles, routes=plan.routes)
    schedule = build_schedule(plan)
    kinds = "FBW" if splits_backward(name) else "FB"
    cells = [(a.kind, a.micro_batch, a.first_layer + i) for a in schedule.order for i in range(a.n_layers)]
    assert sorted(cells) == sorted((k, m, n) for k in kinds for m in range(len(plan.routes)) for n in range(plan.n_layers))
    durations = np.array([data.draw(st.integers(1, 5)) for _ in schedule.order], float)
    message = data.draw(st.integers(0, 3))
    timeline = evaluate(schedule, durations, message)
    at = {(a.kind, a.micro_batch, a.hop): i for i, a in enumerate(schedule.order)}
    for route in plan.routes:
        stage_order = [("F", hop) for hop in range(len(route.hops))] + [("B", hop) for hop in reversed(range(len(route.hops)))]
        positions = [at[kind, route.micro_batch, hop] for kind, hop in stage_order]
        assert (timeline.end_us[positions[:-1]] <= timeline.start_us[positions[1:]]).all()
        assert timeline.makespan_us >= durations[positions].sum()
        for hop in range(len(route.hops)) if "W" in kinds else ():
            assert timeline.end_us[at["B", route.micro_batch, hop]] <= timeline.start_us[at["W", route.micro_batch, hop]]
    assert timeline.makespan_us >= max(timeline.busy_us.values()) - 1e-9
    for _, positions in schedule.chunks.rank_positions():
        assert (timeline.end_us[positions[:-1]] <= timeline.start_us[positions[1:]]).all()


@settings(deadline=None, max_examples=40)
@given(plan=legal_plans(), iterations=st.integers(1, 40), data=st.data())
def test_levels_and_plain_numbers_agree(plan, iterations, data):
    """One pass over many iterations is the same as one iteration at a time, and the order of `order` does not matter."""
    schedule = build_schedule(plan)
    seed = data.draw(st.integers(0, 2**31))
    durations = np.random.default_rng(seed).uniform(1, 9, (len(schedule.order), iterations))
    many = schedule.chunks.makespan_us(durations, 0.5)
    assert many == pytest.approx([float(schedule.chunks.makespan_us(durations[:, i], 0.5)) for i in range(iterations)])


@pytest.mark.parametrize("name", [*PASSES])
def test_an_order_survives_the_exchange_format(name):
    plan = uniform_plan(tp=1, pp=3, dp=1, n_layers=6, micro_batches=6, schedule=name)
    schedule = build_schedule(plan)
    orders = tuple(written(actions, split=splits_backward(name)) for actions in schedule.by_rank.values())
    assert orders[0][0] == "0F0"
    imported = Plan(plan_version=0, n_layers=6, schedule=name, roles=plan.roles, routes=plan.routes, orders=orders)
    assert build_schedule(imported).by_rank == schedule.by_rank
    assert Plan.from_data(imported.to_data()) == imported
    assert imported.digest != plan.digest


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda rows: [rows[0][::-1], rows[1]], "wait for each other"),
        (lambda rows: [rows[0][:-1], rows[1]], "actions where the plan asks for"),
        (lambda rows: [(*rows[0], rows[0][0]), rows[1]], "twice"),
        (lambda rows: [rows[1], rows[0]], "is executed by rank"),
        (lambda rows: [("0X0",), rows[1]], '"2F0"'),
        (lambda rows: [("0F99",), rows[1]], "is not in the plan"),
        (lambda rows: rows[:1], "one order per role"),
    ],
)
def test_orders_that_cannot_be_executed_are_refused(change, sentence):
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=2, micro_batches=3, schedule="zb-h1")
    good = with_orders(plan, build_schedule(plan).by_rank)
    bad = Plan(
        plan_version=0,
        n_layers=2,
        schedule="searched",
        roles=plan.roles,
        routes=plan.routes,
        orders=tuple(change(list(good.orders))),
    )
    with pytest.raises(PlanError, match=sentence):
        build_schedule(bad)


def out_of_order(schedule, lanes) -> set[tuple[int, int]]:
    """Links on which, among messages of one lane, some rank takes messages in another order than they are sent."""
    sent, taken = defaultdict(list), defaultdict(list)
    for actions in schedule.by_rank.values():
        for action in (action for action in actions if action.kind != "W"):
            hops = schedule.plan.routes[action.micro_batch].hops
            step = 1 if action.kind == "F" else -1
            for lists, hop, (source, target) in (
                (sent, action.hop + step, (action.hop, action.hop + step)),
                (taken, action.hop, (action.hop - step, action.hop)),
            ):
                if min(source, target) >= 0 and max(source, target) < len(hops) and hops[source].rank != hops[target].rank:
                    lists[hops[source].rank, hops[target].rank, lanes(action.kind)].append(
                        (action.kind, action.micro_batch, hop)
                    )
    assert sent.keys() == taken.keys()
    return {link[:2] for link in sent if sent[link] != taken[link]}


@settings(deadline=None, max_examples=60)
@given(plan=legal_plans(), name=st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
def test_messages_of_listed_orders_need_no_tags(plan, name):
    plan = Plan(plan_version=0, n_layers=plan.n_layers, schedule=name, roles=plan.roles, routes=plan.routes)
    assert out_of_order(build_schedule(plan), lambda _kind: "any") == set()


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 16)])
def test_messages_of_canonical_orders(ranks, micro_batches):
    """Interleaved 1F1B needs no tags; ZB-V needs a lane for forwards and one for backwards, or tags."""

    def schedule(name):
        return build_schedule(
            uniform_plan(tp=1, pp=ranks, dp=1, n_layers=2 * ranks, micro_batches=micro_batches, schedule=name)
        )

    assert out_of_order(schedule("interleaved"), lambda _kind: "any") == set()
    assert out_of_order(schedule("zb-v"), lambda kind: kind) == set()
