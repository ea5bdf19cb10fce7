"""The predictor finds the coefficients behind noisy chunk times, and says what it cannot know."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.iteration import Chunk, CommittedIteration, IterationTelemetry, Transfer
from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.predictor.fit import (
    NotIdentifiable,
    OwnTime,
    TimedIteration,
    at_healthy_speed,
    fit,
    fit_terms,
    message_costs,
)
from unskew.analytics.predictor.refit import coverage
from unskew.analytics.predictor.retraining import NO_WORSE, IterationSample, PredictorBacktest, fit_seen

TRUTH = CostModel(
    chunks={
        "F": ChunkCost(layer_us=400.0, token_us=8.2, token2_us=0.006, head_us_per_token=12.0),
        "B": ChunkCost(layer_us=800.0, token_us=16.4, token2_us=0.012, head_us_per_token=20.0),
    }
)


def measure(
    *, seed: int, ranks: int = 8, stages: int = 4, n: int = 32, cv: float = 0.03, spikes: float = 0.01, slow=None, tokens=None
) -> list[Chunk]:
    """`n` micro-batches on each rank, F and B; rank r is stage r % stages with 3 or 4 layers; `slow` = {rank: factor}."""
    random = np.random.default_rng(seed)
    chunks = []
    for rank in range(ranks):
        n_layers, has_head = 3 + rank % 2, rank % stages == stages - 1
        bias = random.normal(0, 0.02)
        for _ in range(n):
            total = tokens or int(random.integers(200, 512))
            work = work_of([int(part) for part in 1 + random.dirichlet(np.full(6, 0.5)) * total])
            work = Work(tokens or work.tokens, work.sum_sq)
            for kind in "FB":
                us = TRUTH.chunk_us(kind, work, n_layers, has_head=has_head) * np.exp(random.normal(bias, cv))
                us *= (slow or {}).get(rank, 1.0) * (random.uniform(2, 4) if random.random() < spikes else 1.0)
                chunks.append(Chunk(rank, kind, n_layers, has_head, work, float(us)))
    return chunks


def worst(model: CostModel, works: tuple[Work, ...]) -> float:
    """Largest relative error of the predictions of a healthy device, over layouts never measured as well."""
    return max(
        abs(model.chunk_us(kind, work, n, has_head=head) / TRUTH.chunk_us(kind, work, n, has_head=head) - 1)
        for work in works
        for kind in "FB"
        for n in (2, 4, 6)
        for head in (False, True)
    )


WORKS = (work_of([300]), work_of([100, 100, 100]), work_of([30] * 16), work_of([480]))


def test_exact_times_give_back_the_coefficients() -> None:
    fitted = fit(measure(seed=0, cv=0.0, spikes=0.0, ranks=4, n=6))
    assert worst(fitted.model, WORKS) < 0.05  # the ranks' habits remain
    assert all(terms == () for terms in fitted.unidentified.values())


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0, 1000), st.floats(1, 50), st.floats(1e-3, 0.1), st.floats(0, 50),
    st.lists(st.lists(st.integers(20, 500), min_size=1, max_size=5), min_size=6, max_size=12, unique_by=tuple),
)  # fmt: skip
def test_times_that_follow_the_formula_are_predicted_exactly(
    layer: float, token: float, token2: float, head: float, lengths: list[list[int]]
) -> None:
    """Whatever the coefficients, and also where the data cannot tell the terms apart: on its own data the fit is exact."""
    cost = ChunkCost(layer_us=layer, token_us=token, token2_us=token2, head_us_per_token=head)
    chunks = [
        Chunk(rank, "F", n, rank == 1, work_of(one), cost.us(work_of(one), n, rank == 1))
        for one in lengths
        for rank, n in ((0, 2), (1, 3))
    ]
    fitted = fit(chunks)
    for chunk in chunks:
        predicted = fitted.model.chunk_us("F", chunk.work, chunk.n_layers, has_head=chunk.has_head)
        assert predicted == pytest.approx(chunk.us, rel=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_spikes_and_one_unknown_slow_rank_do_not_bend_the_healthy_reference(seed: int) -> None:
    """Each rank in turn, also one of the two that execute the head."""
    slow = {(3 * seed + 1) % 8: 1.3 + 0.1 * seed}
    fitted = fit(measure(seed=seed, slow=slow))
    assert worst(fitted.model, WORKS) < 0.08
    assert set(fitted.left_out["F"]) == set(fitted.left_out["B"]) == set(slow)


@pytest.mark.parametrize("seed", range(4))
def test_no_healthy_rank_is_left_out(seed: int) -> None:
    fitted = fit(measure(seed=seed, cv=0.08))
    assert fitted.left_out == {"F": (), "B": ()}
    assert worst(fitted.model, WORKS) < 0.1


def test_a_device_believed_slow_is_fitted_as_slow() -> None:
    slow = dict.fromkeys(range(4), 1.8)
    chunks = measure(seed=3, slow=slow)
    assert worst(fit(chunks).model, WORKS) > 0.2
    speeds = {rank: {"F": 1 / 1.8, "B": 1 / 1.8} for rank in slow}
    assert worst(fit(at_healthy_speed(chunks, speeds)).model, WORKS) < 0.06


def test_held_out_error_is_the_noise() -> None:
    quiet, noisy = fit(measure(seed=5, cv=0.02, spikes=0)), fit(measure(seed=5, cv=0.08, spikes=0))
    for kind in "FB":
        assert 1 < quiet.error_percent[kind] < 5
        assert 4 < noisy.error_percent[kind] < 10


def test_equal_token_counts_are_fitted_as_far_as_they_go() -> None:
    fitted = fit(measure(seed=6, tokens=512))
    assert fitted.unidentified == {"F": ("layer_us",), "B": ("layer_us",)}
    assert worst(fitted.model, (Work(512, 60_000), Work(512, 512 * 512))) < 0.06


@pytest.mark.parametrize(("per_layer_us", "per_token_us"), [(400.0, 8.0), (0.0, 8.0), (4000.0, 1.0)])
def test_two_micro_batch_sizes_are_a_line_wherever_it_begins(per_layer_us: float, per_token_us: float) -> None:
    random = np.random.default_rng(3)
    took_us = {tokens: 2 * (per_layer_us + per_token_us * tokens) for tokens in (64, 224)}
    chunks = [
        Chunk(rank, "F", 2, True, work_of([tokens]), us * float(random.lognormal(0, 0.02)))
        for rank, (tokens, us) in enumerate(took_us.items())
        for _ in range(24)
    ]
    model = fit(chunks).model
    for tokens, us in took_us.items():
        assert model.chunk_us("F", work_of([tokens]), 2, has_head=True) == pytest.approx(us, rel=0.02)


def test_a_single_micro_batch_size_and_no_head_still_predict_themselves() -> None:
    chunks = [Chunk(0, "F", 2, False, Work(100, 1000), 5000.0 + i) for i in range(5)]
    fitted = fit(chunks)
    assert fitted.unidentified == {"F": ("head_us_per_token", "token2_us", "layer_us")}
    assert fitted.model.chunk_us("F", Work(100, 1000), 2, has_head=False) == pytest.approx(5002, rel=1e-3)


@pytest.mark.parametrize("chunks", [[], [Chunk(0, "F", 2, False, Work(100, 1000), 0.0)]])
def test_nothing_to_fit_is_refused(chunks: list[Chunk]) -> None:
    with pytest.raises(NotIdentifiable, match="at least one with tokens and a positive time"):
        fit(chunks)


def test_the_iteration_end_is_what_chunks_and_messages_leave() -> None:
    """Measured iterations carry 2 ms messages, a 15 ms end, 1 % noise, and two that took three times as long."""
    plan = uniform_plan(tp=1, pp=4, dp=2, n_layers=14, micro_batches=8)
    random = np.random.default_rng(7)
    truth = CostModel(chunks=TRUTH.chunks, message_us=2000.0, iteration_end_us=15_000.0)
    seen = []
    for i in range(20):
        works = tuple(work_of([int(x) for x in random.integers(20, 120, 5)]) for _ in plan.routes)
        us = predict_iteration(plan, works, truth).iteration_us * random.normal(1, 0.01) * (3 if i in (4, 11) else 1)
        seen.append(TimedIteration(plan, works, us))
    fitted = fit_terms(
        fit(measure(seed=8, n=40)),
        seen,
        lambda one, cost: predict_iteration(one.plan, one.works, cost).iteration_us,
        [Transfer(0, 1, us) for us in (1900, 2000, 9000)],
    )
    assert fitted.model.message_us == 2000
    predicted = [predict_iteration(plan, one.works, fitted.model).iteration_us / one.us for one in seen]
    assert np.median(predicted) == pytest.approx(1, abs=0.01)
    assert fitted.error_percent["iteration"] < 10
    with pytest.raises(NotIdentifiable):
        fit_terms(fitted, [], lambda *_: 0.0)


@pytest.mark.parametrize("cv", [0.01, 0.05])
def test_error_bars_cover_nine_in_ten_of_what_was_not_fitted(cv: float) -> None:
    """Chunks with heavy-tailed noise (1 % take two to four times as long); later micro-batches on the same ranks."""
    chunks = measure(seed=11, n=180, cv=cv)
    fitted = fit([chunk for i, chunk in enumerate(chunks) if i % 360 < 120])
    later = [chunk for i, chunk in enumerate(chunks) if i % 360 >= 120]
    for kind in "FB":
        mine = [chunk for chunk in later if chunk.kind == kind]
        inside = 0
        for chunk in mine:
            us = fitted.model.chunk_us(kind, chunk.work, chunk.n_layers, has_head=chunk.has_head)
            inside += abs(np.log(chunk.us / us)) <= fitted.model.prediction_intervals[kind]
        assert 0.84 <= inside / len(mine) <= 0.97


def test_coverage_of_iterations_is_counted_as_that_of_chunks() -> None:
    """Three iterations within their error bar of 10 %, one 50 % longer than predicted; its two micro-batches likewise."""
    plan, works = uniform_plan(tp=1, pp=2, dp=1, n_layers=4, micro_batches=2), (work_of([40]), work_of([60]))
    cost = ChunkCost(layer_us=100.0, token_us=1.0, token2_us=0.0)
    model = CostModel(chunks={"F": cost, "B": cost}, prediction_intervals={"F": 0.1, "iteration": 0.1})
    predicted = predict_iteration(plan, works, model).iteration_us

    def seen(iteration: int, factor: float) -> IterationSample:
        chunks = tuple(
            Chunk(rank=0, kind="F", n_layers=2, has_head=False, work=work, us=factor * cost.us(work, 2, has_head=False))
            for work in works
        )
        committed = CommittedIteration(
            iteration=iteration, plan_version=0, chunks=chunks, works=works, measured_us=factor * predicted, log_complete=True
        )
        return IterationSample(IterationTelemetry(committed=committed), plan, {})

    later = [seen(i, factor) for i, factor in enumerate((1.0, 1.05, 0.95, 1.5))]
    assert coverage(model, later) == {"F": 0.75, "iteration": 0.75}


def test_no_error_bar_from_too_few() -> None:
    fitted = fit(measure(seed=1, ranks=1, n=8))
    assert fitted.model.prediction_intervals == {}


def test_gradient_groups_that_share_ranks_follow_each_other() -> None:
    """PP4 x DP2: equal partitions reduce side by side; shifted ones in a chain through all seven groups."""
    cost = CostModel(chunks=TRUTH.chunks, iteration_end_us=10_000.0, collective_us=1500.0)
    equal = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=8)
    assert cost.end_us(equal) == 10_000
    shifted = plan_from_partition(
        plan_version=1, n_layers=16, schedule="1f1b", members=[(0, 1, 2, 3), (4, 5, 6, 7)], layers=[(4, 4, 4, 4), (5, 4, 4, 3)],
        micro_batches=[4, 4],
    )  # fmt: skip
    assert len(shifted.gradient_groups) == 7
    assert cost.end_us(shifted) == 10_000 + 6 * 1500
    one = plan_from_partition(
        plan_version=2, n_layers=16, schedule="1f1b", members=[(0, 1, 2, 3), (4, 5, 6, 7)], layers=[(4, 4, 4, 4), (4, 4, 5, 3)],
        micro_batches=[4, 4],
    )  # fmt: skip
    assert cost.end_us(one) == 10_000 + 2 * 1500  # only stages 2 and 3 are tied together
    works = [work_of([100, 100]) for _ in range(8)]
    free = msgspec.structs.replace(cost, collective_us=0.0)
    apart = predict_iteration(shifted, works, cost).iteration_us - predict_iteration(shifted, works, free).iteration_us
    assert apart == pytest.approx(9000)


@pytest.mark.parametrize(
    ("chunks", "iterations", "replaces"),
    [
        (0.02, 0.029, True),
        (0.02, 0.03, False),
        (0.02 + NO_WORSE / 2, 0.01, True),
        (0.02 + 2 * NO_WORSE, 0.0, False),
        (0.0, 0.06, False),
    ],
)
def test_a_predictor_replaces_one_when_its_chunks_are_no_worse_and_the_sum_of_its_errors_is_smaller(
    chunks: float, iterations: float, replaces: bool
) -> None:
    old = PredictorBacktest(n=8, chunks=0.02, iterations=0.03)
    assert PredictorBacktest(n=8, chunks=chunks, iterations=iterations).beats(old) is replaces


def test_messages_are_fitted_by_their_size_only_where_that_explains_them() -> None:
    random = np.random.default_rng(3)
    tokens = random.integers(100, 300, 60)
    sized = [Transfer(0, 1, 1000.0 + 7.0 * int(n) + random.normal(0, 20), int(n)) for n in tokens]
    late = [Transfer(1, 0, 60_000.0, 200, whole=False)] * 100  # behind others, or seen from their middle on
    latency_us, token_us = message_costs([*sized, *late])
    assert (latency_us, token_us) == (pytest.approx(1000, rel=0.05), pytest.approx(7, rel=0.05))
    noisy = [Transfer(0, 1, float(random.normal(900, 200)), int(n)) for n in tokens]
    latency_us, token_us = message_costs(noisy)
    assert (latency_us, token_us) == (pytest.approx(900, rel=0.1), 0.0)
    assert message_costs(late) == (60_000.0, 0.0)
    assert message_costs([]) == (0.0, 0.0)


def test_the_only_rank_with_the_head_is_suspected_so_chunks_keep_their_costs_and_the_end_is_learned() -> None:
    """PP2: rank 1 is half as fast, unknown to anybody; the end grew from 15 to 25 ms. Its ratios tell the end."""
    plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=8, micro_batches=4)
    random = np.random.default_rng(4)

    def sample(iteration: int, end_us: float, speed: float) -> IterationSample:
        works = tuple(work_of([int(x) for x in random.integers(20, 120, 5)]) for _ in plan.routes)
        truth, speeds = CostModel(chunks=TRUTH.chunks, iteration_end_us=end_us), {1: {"F": speed, "B": speed}}
        chunks = tuple(
            Chunk(hop.rank, kind, 4, hop.rank == 1, works[route.micro_batch],
                  truth.chunk_us(kind, works[route.micro_batch], 4, has_head=hop.rank == 1, speed=speed if hop.rank else 1.0))
            for route in plan.routes for hop in route.hops for kind in "FB"
        )  # fmt: skip
        us = predict_iteration(plan, works, truth, speeds).iteration_us
        committed = CommittedIteration(
            iteration=iteration, plan_version=0, chunks=chunks, works=works, measured_us=us, log_complete=True
        )
        return IterationSample(IterationTelemetry(committed=committed), plan, {})

    before = fit_seen([sample(i, 15_000.0, 1.0) for i in range(1, 12)])
    assert before is not None
    after = fit_seen([sample(i, 25_000.0, 0.5) for i in range(12, 30)], suspects={1}, before=before)
    assert after is not None
    assert after.model.chunks == before.model.chunks
    assert after.model.iteration_end_us == pytest.approx(25_000, rel=0.01)
    bent = fit_seen([sample(i, 25_000.0, 0.5) for i in range(12, 30)])
    assert bent is not None
    assert bent.model.chunks != before.model.chunks


def test_what_a_chunk_takes_by_itself_is_no_part_of_its_layers() -> None:
    """Before a plan gives ranks different numbers of layers, their chunks cannot tell; ranks measured it meanwhile."""
    truth = CostModel(
        chunks={
            kind: ChunkCost(layer_us=200.0 * k, token_us=3.0 * k, token2_us=0.001, head_us_per_token=2.0, own_us=300.0 * k)
            for kind, k in (("F", 1), ("B", 2))
        }
    )
    plan, random = uniform_plan(n_layers=8, tp=1, pp=2, dp=1, micro_batches=4), np.random.default_rng(3)

    def sample(iteration: int) -> IterationSample:
        works = tuple(work_of([int(n) for n in random.integers(10, 100, 3)]) for _ in plan.routes)
        chunks = tuple(
            Chunk(rank, kind, 4, rank == 1, work, truth.chunk_us(kind, work, 4, has_head=rank == 1))
            for work in works for rank in (0, 1) for kind in "FB"
        )  # fmt: skip
        committed = CommittedIteration(
            iteration=iteration, plan_version=0, chunks=chunks, works=works, measured_us=1e5, log_complete=True
        )
        own_us = {0: {"B": 600.0}, 1: {"F": 300.0}} if iteration else {0: {"B": 9_000.0}, 1: {"F": 9_000.0}}
        return IterationSample(IterationTelemetry(committed=committed, own_us=own_us), plan, {})

    seen = [sample(i) for i in range(8)]
    found = fit_seen(seen)
    assert found is not None
    for kind, n_layers in (("F", 1), ("B", 1), ("F", 7), ("B", 7)):
        expected = truth.chunk_us(kind, WORKS[0], n_layers, has_head=False)
        assert found.model.chunk_us(kind, WORKS[0], n_layers, has_head=False) == pytest.approx(expected, rel=0.01)
    slow = [msgspec.structs.replace(one, speeds={rank: {"F": 0.5, "B": 0.5} for rank in (0, 1)}) for one in seen]
    of_slow = fit_seen(slow)
    assert of_slow is not None
    assert of_slow.model.chunks["F"].own_us == 0.0


def own_chunks(own_us: float, ranks: range, tp: int = 1, *, n: int = 100) -> list[Chunk]:
    """`n` forward chunks of each rank, of 2 to 5 layers, with noise of 5 %."""
    random, found = np.random.default_rng(11), []
    cost = ChunkCost(layer_us=200.0, token_us=3.0, token2_us=0.001, head_us_per_token=2.0, own_us=own_us)
    for rank in ranks:
        for _ in range(n):
            work, n_layers = work_of([int(n) for n in random.integers(10, 200, 3)]), int(random.integers(2, 6))
            us = cost.us(work, n_layers, False) * float(np.exp(random.normal(0, 0.05)))
            found.append(Chunk(rank, "F", n_layers, False, work, us, tp=tp))
    return found


def test_where_nobody_measured_it_a_chunk_takes_nothing_by_itself() -> None:
    """Neither in groups, nor on devices of another class; what a degree never executed takes is no less than nearby."""
    chunks = [*own_chunks(2000.0, range(2)), *own_chunks(0.0, range(2, 4), tp=2), *own_chunks(500.0, range(4, 6))]
    classes = {"old": (4, 5)}
    measured = [OwnTime(0, 1, {"F": 2000.0}), OwnTime(1, 1, {"F": 2000.0}), OwnTime(4, 1, {"F": 500.0})]
    model = fit(chunks, classes, measured).model
    assert model.costs_at(("", 1))["F"].own_us == 2000.0
    assert model.costs_at(("", 2))["F"].own_us == 0.0
    assert model.costs_at(("old", 1))["F"].own_us == 500.0
    assert model.costs_at(("old", 2))["F"].own_us == 500.0
    assert fit(chunks, classes, measured[:2]).model.costs_at(("old", 1))["F"].own_us == 0.0


def test_a_single_short_chunk_does_not_bound_what_chunks_take_by_themselves() -> None:
    chunks, own = own_chunks(1661.0, range(4)), [OwnTime(0, 1, {"F": 1661.0})]
    whole = fit(chunks, None, own).model.chunks["F"]
    bent = fit([msgspec.structs.replace(chunks[0], us=2.0), *chunks[1:]], None, own).model.chunks["F"]
    assert bent.own_us == whole.own_us == 1661.0
    assert bent.token_us == pytest.approx(whole.token_us, rel=0.01)


def test_stated_errors_are_of_whole_chunks_with_what_they_take_by_themselves() -> None:
    chunks = own_chunks(1500.0, range(4))
    found = fit(chunks, None, [OwnTime(0, 1, {"F": 1500.0})])
    assert found.error_percent["F"] == pytest.approx(4.0, abs=0.4)  # the mean deviation of noise of 5 %
    assert found.model.prediction_intervals["F"] == pytest.approx(0.082, abs=0.01)  # 1.645 of its standard deviations
