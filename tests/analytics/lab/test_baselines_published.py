"""Each published detector reproduces a figure or a documented case of its own, and all keep the interface."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.iteration import Chunk, CommittedIteration
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.published.change_point import ChangePointOptions, Series
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.lab.baselines.nvrx import scores
from unskew.analytics.lab.baselines.registry import METHODS
from unskew.analytics.lab.baselines.traceml import least_waiting
from unskew.analytics.lab.studies.detection import SETTINGS, run, synthetic_job
from unskew.analytics.lab.studies.noise import device_factors, load_lengths, load_noise
from unskew.analytics.replay.method import MethodInput
from unskew.collector.events import Verdict

NOISE = load_noise()


def change_points(times: Floats, *, verify: bool) -> list[int]:
    series, found, options = Series(), [], ChangePointOptions()
    for position, us in enumerate(times.tolist()):
        series = series.observe(us, options)
        change = series.change(options)
        if change is not None:
            series = series.taken(change)
            found += [position] if not verify or change.verified(options) else []
    return found


def probe_job(seed: int, factors: Sequence[tuple[int, float]] = ()) -> Floats:
    """Iteration times (us) of a short job on one node with a static workload, slower by each factor from its iteration on."""
    random = np.random.default_rng([NOISE.seeds.tuning, seed])
    times = 1e7 * device_factors(NOISE, random, 160, 1)[:, 0] * np.exp(random.normal(0, 0.01, 160))
    for at, factor in factors:
        times[at:] *= factor
    return times


@pytest.mark.slow
@pytest.mark.limit(120)
def test_greyhounds_table_of_its_own_single_node_probes() -> None:
    """Published (compute): BOCD alone finds every fail-slow with 18.4 % false positives, verification leaves none of them."""
    healthy = [probe_job(seed) for seed in range(60)]
    slow = [probe_job(100 + seed, [(60 + 5 * seed, 1.2)]) for seed in range(8)]
    alone = sum(bool(change_points(times, verify=False)) for times in healthy) / len(healthy)
    assert 0.05 < alone < 0.3
    assert not any(change_points(times, verify=True) for times in healthy)
    delays = [change_points(times, verify=True)[0] - (60 + 5 * seed) for seed, times in enumerate(slow)]
    assert max(delays) <= 3  # "within 2 to 3 iterations"


def test_greyhound_misses_successive_drops_of_less_than_ten_percent_as_it_says() -> None:
    assert change_points(probe_job(7, [(60, 1.08), (90, 1.08)]), verify=True) == []


@pytest.mark.limit(120)
def test_resihp_finds_the_severe_fail_slows_of_its_experiments_and_its_filter_only_removes_alarms() -> None:
    """Published: accuracy 0.98 to 1.00 where jobs lose 35 to 70 % of their throughput; the filter takes false alarms away."""
    lengths, found, alarms = load_lengths("code"), 0, {"resihp": 0, "greyhound": 0}
    methods = [METHODS[name] for name in alarms]
    for seed in range(6):
        job = synthetic_job(SETTINGS[1], NOISE.seeds.tuning + seed, NOISE, lengths, 4.0 if seed % 2 else None)
        resihp, greyhound = run(job, methods)
        assert resihp.named == (job.fault is not None)
        found += resihp.named
        alarms["resihp"] += resihp.false_alarms
        alarms["greyhound"] += greyhound.false_alarms
    assert found == 3
    assert alarms["resihp"] <= alarms["greyhound"]


def test_nvrx_scores_are_the_references_median_over_the_ranks_own() -> None:
    """Its two scores, to the digit: relative to the fastest rank, individual to the rank's own best report."""
    medians = {0: {"F": 10.0, "B": 20.0}, 1: {"F": 12.5, "B": 32.0}, 2: {"F": 10.0, "B": 25.0, "eval": 3.0}}
    first = scores(medians, {})
    assert first.relative == {0: {"B": 1.0, "F": 1.0}, 1: {"B": 0.625, "F": 0.8}, 2: {"B": 0.8, "F": 1.0}}
    again = scores({rank: {kind: 2 * us for kind, us in own.items()} for rank, own in medians.items()}, first.lowest)
    assert again.individual == {0: {"B": 0.5, "F": 0.5}, 1: {"B": 0.5, "F": 0.5}, 2: {"B": 0.5, "F": 0.5, "eval": 0.5}}
    assert again.relative == first.relative  # a job slow as a whole is nobody's relative straggler


def test_traceml_names_the_rank_that_waits_least_where_backward_wall_time_hides_it() -> None:
    """Its documented case: one rank's backward takes 200 ms longer, and the barrier makes all ranks' steps equally long."""
    spent = {rank: {"F": 30_000.0, "B": 90_000.0 + 200_000.0 * (rank == 3)} for rank in range(8)}
    found = least_waiting(spent, 330_000.0)
    assert found is not None
    assert (found.rank, found.kinds) == (3, ("B",))
    assert found.impact == pytest.approx(200 / 330)
    assert least_waiting({**spent, 3: {"F": 30_000.0, "B": 120_000.0}}, 330_000.0) is None


PLAN = uniform_plan(tp=1, pp=2, dp=4, n_layers=8, micro_batches=16)
COST = CostModel(
    chunks={kind: ChunkCost(layer_us=100.0 * k, token_us=5.0 * k, token2_us=0.01 * k) for kind, k in (("F", 1), ("B", 2))}
)


def uneven_batches(plan: Plan, n: int, seed: int) -> list[CommittedIteration]:
    """Healthy iterations of a job whose replica 0 draws long documents: its micro-batches cost about twice the others'."""
    random = np.random.default_rng(seed)
    found = []
    for iteration in range(n):
        works = [work_of([2048] if route.replica == 0 else [256] * 8) for route in plan.routes]
        chunks = tuple(
            Chunk(hop.rank, kind, hop.n_layers, hop.first_layer + hop.n_layers == plan.n_layers, works[route.micro_batch],
                  COST.chunk_us(kind, works[route.micro_batch], hop.n_layers, has_head=False) * float(random.normal(1, 0.01)))
            for route in plan.routes for hop in route.hops for kind in "FB"
        )  # fmt: skip
        found.append(
            CommittedIteration(
                iteration=iteration, plan_version=0, chunks=chunks, works=tuple(works), log_complete=True,
                measured_us=2e6 * float(random.normal(1, 0.01)),
            )
        )  # fmt: skip
    return found


def test_long_documents_accuse_healthy_ranks_where_lengths_are_not_known_and_nobody_where_they_are() -> None:
    flagged: dict[str, set[int | None]] = {}
    for name in ("nvrx", "traceml", "unskew"):
        method = METHODS[name]()
        outcomes = [method.observe(MethodInput(committed=one, plan=PLAN, cost=COST)) for one in uneven_batches(PLAN, 40, 1)]
        flagged[name] = {v.culprits[0].rank for o in outcomes for v in o.verdicts if isinstance(v, Verdict)}
    replica_0 = {role.rank for role in PLAN.roles if role.replica == 0}
    assert flagged["nvrx"] == replica_0
    assert flagged["traceml"]
    assert flagged["traceml"] <= replica_0
    assert flagged["unskew"] == set()


def test_traceml_never_mixes_two_plans_in_its_window() -> None:
    """Fifteen iterations under one plan, then fifteen under the next: twenty in a row under one plan there never were."""
    method = METHODS["traceml"]()
    outcomes = [
        method.observe(
            MethodInput(committed=msgspec.structs.replace(one, plan_version=one.iteration // 15), plan=PLAN, cost=COST)
        )
        for one in uneven_batches(PLAN, 30, 1)
    ]
    assert all(outcome.verdicts == () for outcome in outcomes)
    later = [
        method.observe(
            MethodInput(
                committed=msgspec.structs.replace(one, iteration=30 + one.iteration, plan_version=1), plan=PLAN, cost=COST
            )
        )
        for one in uneven_batches(PLAN, 5, 3)
    ]
    assert later[-1].verdicts


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_waits_without_a_predictor_or_works_without_it_and_says_its_name(name: str) -> None:
    method = METHODS[name]()
    assert method.name == name
    for one in uneven_batches(PLAN, 5, 2):
        assert method.observe(MethodInput(committed=one, plan=PLAN)).verdicts == ()
