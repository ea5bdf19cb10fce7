"""One rank turns slow, on the sleeping device and on real cores: is it named, how soon, and what is the new plan worth?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import fmean, median

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.pipeline.prediction import predict_iterations
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, TWO_RANKS, Bench, FinishedRun, done, done_of
from unskew.collector.events import (
    Fault,
    IterationCommitted,
    MicroBatchPacked,
    PlanApplied,
    PlanScored,
    PredictorFitted,
    Verdict,
)
from unskew.runtime.options import RunOptions
from unskew.runtime.placement import cores

OPTIONS = msgspec.structs.replace(EIGHT_RANKS, device="sleep")
AT = 14
SEEDS = range(20)
ON_CORES = {
    name: msgspec.structs.replace(TWO_RANKS, pp=pp, dp=dp, iterations=100, respawns=0)
    for name, pp, dp in (("PP2", 2, 1), ("DP2", 1, 2), ("PP2 x DP2", 2, 2))
}
"""Where there are fewer cores than ranks, these share them, and the evaluator knows."""
AT_ON_CORES, FACTORS_ON_CORES = 30, (1.5, 2.0, 3.0)
SEEDS_ON_CORES, ALL_SEEDS_ON_CORES = range(4), range(10)


def figures_of_a_strong_fault(bench: Bench, seeds: Sequence[int] = SEEDS, iterations: int = 40) -> list[Figure]:
    """x1.8: named, repaired, predicted, repaid."""
    runs = _runs(bench, seeds, 1.8, msgspec.structs.replace(OPTIONS, iterations=iterations))
    errors = errors_of_plans(runs)
    healthy = OPTIONS.ranks - 1
    shares = [share for run in runs if (share := share_of_the_possible(run, AT, healthy + 1 / 1.8)) is not None]
    scored = f"{len(errors)} plans scored over 10 to 20 iterations each, in {len(runs)} runs"
    means = "healthy time, scaled to the batches that ran by prediction, x 8 / 7.56 over measured"
    return [
        done("slow x1.8", runs),
        *detection([*map(seen_in, runs)], "slow x1.8", within=5, bar=len(runs)),
        figure(
            "slow x1.8: runs whose plan was changed", sum(len(run.of(PlanApplied)) > 1 for run in runs), "", bar=len(runs),
            better="higher",
        ),
        figure(
            "slow x1.8: predicted against measured iteration time after the change, median error",
            100 * median(errors) if errors else None, "%", bar=5, better="lower", note=scored,
        ),
        figure(
            "slow x1.8: the same, worst plan", 100 * max(errors) if errors else None, "%", bar=5, better="lower", note=scored
        ),
        figure(
            "slow x1.8: throughput after the change, of what the surviving speed would allow, median",
            100 * median(shares) if shares else None, "%", bar=85, better="higher", note=means,
        ),
        figure(
            "slow x1.8: the same, worst run", 100 * min(shares) if shares else None, "%", bar=85, better="higher",
            note=f"{len(shares)} runs",
        ),
    ]  # fmt: skip


def figures_of_a_weak_fault(bench: Bench, seeds: Sequence[int] = SEEDS, iterations: int = 30) -> list[Figure]:
    """x1.3: named."""
    runs = _runs(bench, seeds, 1.3, msgspec.structs.replace(OPTIONS, iterations=iterations))
    return [done("slow x1.3", runs), *detection([*map(seen_in, runs)], "slow x1.3", within=10, bar=len(runs) - 1)]


def figures_on_cores(
    bench: Bench,
    seeds: Sequence[int] | None = None,
    factors: Sequence[float] = FACTORS_ON_CORES,
    layouts: Sequence[str] = tuple(ON_CORES),
) -> Iterator[Figure]:
    """The same rows on real CPU cores, layout by layout and slowdown by slowdown."""
    asked = (ALL_SEEDS_ON_CORES if bench.full else SEEDS_ON_CORES) if seeds is None else seeds
    for name, factor in product(layouts, factors):
        title = f"slow x{factor:g}, real cores, {name}"
        seen = bench.kept(title, asked, partial(_seen_on_cores, bench, name, factor), SlowRank)
        errors = [error for one in seen for error in one.errors]
        yield done_of(title, [one.failure for one in seen])
        yield from detection(seen, title, within=40, bar=len(seen))
        yield figure(
            f"{title}: predicted against measured iteration time after the change, median error",
            100 * median(errors) if errors else None, "%", bar=5, better="lower",
            note=f"{len(errors)} plans in {len(seen)} runs on {cores()} cores; worst {100 * max(errors, default=0.0):.1f} %",
        )  # fmt: skip


def _seen_on_cores(bench: Bench, name: str, factor: float, seed: int) -> SlowRank:
    options = msgspec.structs.replace(ON_CORES[name], seed=seed)
    return seen_in(bench.run(options, _slow(options, factor, AT_ON_CORES)))


def errors_of_plans(runs: Sequence[FinishedRun]) -> list[float]:
    """Of each plan that was scored, how far the predicted iteration is from the measured one."""
    return [
        abs(score.predicted_s - score.measured_s) / score.measured_s
        for run in runs
        for score in run.of(PlanScored)
        if score.predicted_s is not None and score.measured_s is not None
    ]


def _runs(bench: Bench, seeds: Sequence[int], factor: float, options: RunOptions) -> list[FinishedRun]:
    asked = [msgspec.structs.replace(options, seed=seed) for seed in seeds]
    title = f"slow x{factor}, {options.device} device, PP{options.pp} x DP{options.dp}"
    return [bench.run(one, _slow(one, factor, AT)) for one in bench.steps(title, asked)]


def _slow(options: RunOptions, factor: float, at: int) -> str:
    """The fault: each rank in turn."""
    return f"slow:rank={options.seed % options.ranks},factor={factor},at={at}"


def _fault(run: FinishedRun) -> Fault:
    """The one that was injected."""
    (fault,) = run.options.faults
    return fault


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a rank that was slowed from iteration `at` on: `delay`, slowed iterations up to and with the one whose
    judgement named it (None = it was not); verdicts on `others`; `errors` of the plans that were scored; why the run ended
    before its end."""

    at: int
    delay: int | None
    others: int
    errors: tuple[float, ...]
    failure: str


def seen_in(run: FinishedRun) -> SlowRank:
    """What became of it in this run."""
    at, verdicts = _fault(run).at_iteration, run.of(Verdict)
    right = [verdict for verdict in verdicts if _is_right(run, verdict)]
    return SlowRank(
        at=at,
        delay=next((verdict.at_iteration - at + 1 for verdict in right if verdict.at_iteration >= at), None),
        others=len(verdicts) - len(right),
        errors=tuple(errors_of_plans([run])),
        failure=run.failure,
    )


def detection(seen: Sequence[SlowRank], title: str, *, within: int, bar: int) -> list[Figure]:
    """In how many of the runs the slowed rank was named, and what else was."""
    delays = [one.delay for one in seen if one.delay is not None]
    named = sum(delay <= within for delay in delays)
    worst = f": median {median(delays):g}, at most {max(delays)}" if delays else ""
    return [
        figure(
            f"{title}: right rank, cause slow_device, within {within} iterations", named, "", bar=bar, better="higher",
            note=f"of {len(seen)} seeds, each rank in turn, from iteration {seen[0].at} on; slowed iterations it took{worst}",
        ),
        figure(f"{title}: verdicts on any other rank or cause", sum(one.others for one in seen), "", bar=0, better="lower"),
    ]  # fmt: skip


def _is_right(run: FinishedRun, verdict: Verdict) -> bool:
    return verdict.cause == "slow_device" and [party.rank for party in verdict.culprits] == [_fault(run).rank]


def share_of_the_possible(run: FinishedRun, at: int, surviving: float) -> float | None:
    """Throughput under the last plan over that of devices whose speeds add up to `surviving` and lose nothing by it; the first
    fault comes in iteration `at`.

    The healthy iteration time on those batches is not before-mean: it is the first plan's prediction on them by the predictor
    fitted in warm-up, times measured over predicted of the iterations before the fault (the first one, which pays for
    start-up, left out). Iterations under the last plan count from its second on.
    """
    *_, last = run.of(PlanApplied)
    fits = run.of(PredictorFitted)
    measured_us: dict[int, int] = {}
    for commit in run.of(IterationCommitted):
        measured_us[commit.iteration] = max(commit.wall_us, measured_us.get(commit.iteration, 0))
    after = [iteration for iteration in measured_us if iteration > last.iteration]
    if last.plan_version == 0 or not fits or not after:
        return None
    cost = msgspec.convert(fits[0].model, CostModel)
    works = works_of(run)
    first = run.options.first_plan()
    predicted_us = dict(zip(works, predict_iterations(first, list(works.values()), cost), strict=True))
    before = range(1, at)
    honest = fmean(measured_us[i] for i in before) / fmean(predicted_us[i] for i in before)
    healthy_us = honest * fmean(predicted_us[i] for i in after)
    return float(healthy_us * run.options.ranks / surviving / fmean(measured_us[i] for i in after))


def works_of(run: FinishedRun) -> dict[int, tuple[Work, ...]]:
    """iteration -> work of its micro-batches."""
    lengths = {(event.iteration, event.micro_batch): event.lengths for event in run.of(MicroBatchPacked)}
    return {
        iteration: tuple(work_of(lengths[iteration, number]) for number in range(run.options.micro_batches))
        for iteration in range(run.options.iterations)
    }
