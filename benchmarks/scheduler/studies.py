"""Figures of simulator, policies, studies: seconds at size, worked numbers, Unskew against ResiHP, measured traces."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support import datasets

from unskew.analytics.cluster.job import JOBS
from unskew.analytics.cluster.timing import fault_free_s
from unskew.analytics.lab.simulator.arrivals import FaultLaw, arrivals
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.studies.frame import StudyRow
from unskew.analytics.lab.studies.registry import STUDIES
from unskew.analytics.policies.papers.ft_hsdp import closed_form
from unskew.analytics.policies.papers.recover import MicroBatchShares, boundary, steady
from unskew.analytics.policies.registry import POLICIES
from unskew.benchmarks.report import Better, Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.edge.run_study import StudyResult, run_study

SEEDS = 5


def figures(bench: Bench, seeds: int = SEEDS) -> Iterator[Figure]:
    """Everything of this part; the studies with `seeds` seeds."""
    yield from _seconds()
    yield from _worked()
    yield from _recorded()
    yield from _against_resihp(bench, seeds)
    yield from _wrong_estimates(bench, seeds)


def _seconds() -> list[Figure]:
    job = JOBS["llama2-70b"]
    hours = 10_000 * fault_free_s(job) / 3600.0
    law = FaultLaw(mtbf_s=6 * 3600.0, repair_s=7200.0, slow_per_100_hours=20.0)
    begun = time.perf_counter()
    outcome = simulate(job, POLICIES["unskew"](), arrivals(job, law, hours=hours, seed=0), SimulationOptions(hours=hours))
    spent = time.perf_counter() - begun
    note = f"{outcome.iterations} iterations, {outcome.failures} failures, {len(outcome.changes)} changes, policy unskew"
    found = [figure("10,000 iterations of 256 GPUs with failures", spent, "s", bar=60, better="lower", note=note)]
    large = JOBS["ft-hsdp-98k"]
    day = arrivals(large, FaultLaw(mtbf_s=1080.0), hours=24.0, seed=0)
    begun = time.perf_counter()
    outcome = simulate(large, POLICIES["ft-hsdp"](), day, SimulationOptions(hours=24.0))
    spent = time.perf_counter() - begun
    note = f"{outcome.iterations} iterations, {outcome.failures} failures"
    return [*found, figure("a day of 98,304 GPUs in 12 replicas", spent, "s", bar=60, better="lower", note=note)]


def _worked() -> list[Figure]:
    """1.0 = every digit: that FT-HSDP prints, and that ReCoVer's rule gives by hand."""
    sync, ft_hsdp = closed_form(1080, 600, 12, 180)
    recover = [
        steady(8192, 63, 128) == MicroBatchShares(131, 62, 70, 0),
        [steady(8192, left, 128).each for left in (48, 33, 32)] == [171, 249, 256],
        boundary(8192, 63, 8064) == (3, 61),
        steady(12, 5, 1) == MicroBatchShares(3, 4, 0, 1),
    ]
    published = [round(100 * sync, 1) == 44.4, round(100 * ft_hsdp, 1) == 80.1]
    return [
        figure(
            "ReCoVer's rule met, numbers by hand (the paper prints none)",
            sum(recover) / len(recover),
            "share",
            bar=1,
            better="higher",
        ),
        figure("FT-HSDP's worked numbers met", sum(published) / len(published), "share", bar=1, better="higher"),
    ]


_RECORDED: tuple[tuple[str, str, str, float | None, Better], ...] = (
    ("what-if-bytedance", "SE: mean step error (%)", "%", 2.0, "lower"),
    ("what-if-bytedance", "ST: mean step error (%)", "%", 5.0, "lower"),
    ("bloom", "181B, 37 rows: median error (%)", "%", 10.0, "lower"),
    ("bloom", "181B, 37 rows: rank correlation", "", 0.9, "higher"),
    ("bloom", "181B, 37 rows: rank correlation, without any row of the same configuration", "", 0.9, "higher"),
    ("bloom", "181B, 37 rows: rank correlation with the exchanged row as typed", "", None, "higher"),
    ("bloom", "181B, 37 rows: rank correlation of measuring again", "", None, "higher"),
    ("bloom", "182B, 7 rows: rank correlation", "", 0.9, "higher"),
    ("bloom", "200B, 7 rows: rank correlation", "", 0.9, "higher"),
    ("bloom", "200B, 7 rows: rank correlation of measuring again", "", None, "higher"),
    ("bloom", "out of memory, predicted to fit", "rows", 0.0, "lower"),
    ("bloom", "ran, predicted out of memory", "rows", 0.0, "lower"),
)


def _recorded() -> list[Figure]:
    """What public recordings show, where they are at hand."""
    found, rows = [], dict[tuple[str, str], StudyRow]()
    with tempfile.TemporaryDirectory(prefix="unskew-studies-") as folder:
        for name in dict.fromkeys(name for name, *_ in _RECORDED):
            if place := datasets.find(STUDIES[name].needs):
                result = run_study(STUDIES[name], seeds=1, out=Path(folder), data=place.parent)
                rows |= {(name, row.figure): row for row in result.rows}
    for name, what, unit, bar, better in _RECORDED:
        row = rows.get((name, what))
        note = row.why if row else f"data set {STUDIES[name].needs} is absent"
        found.append(figure(f"{name}: {what}", row.ours if row else None, unit, bar=bar, better=better, note=note))
    return found


def _against_resihp(bench: Bench, seeds: int) -> Iterator[Figure]:
    """Cells in which Unskew is worse than ResiHP beyond the interval, and how far it stays below the surviving capacity."""
    with tempfile.TemporaryDirectory(prefix="unskew-studies-") as folder:
        for name in ("resihp-table6", "resihp-fig9", "resihp-fig10"):
            result = run_study(STUDIES[name], seeds=seeds, out=Path(folder), on_cell=bench.counted(name))
            gains = [row for row in result.rows if row.figure.endswith("unskew - resihp") and row.ours is not None]
            worse = [row.figure for row in gains if (row.high if row.high is not None else row.ours) < 0]  # type: ignore[operator]
            note = (
                f"{len(gains)} cells, {seeds} seeds; least gain {min(row.ours for row in gains if row.ours is not None):+.3f}"
            )
            yield figure(f"{name}: cells worse than ResiHP", len(worse), "cells", bar=0, better="lower", note=note)
            yield figure(f"{name}: mean gap to capacity", _gap(result), "%", better="lower", note="Unskew")


def _gap(result: StudyResult) -> float:
    ours = {row.figure: row.ours for row in result.rows}
    gaps = [
        100.0 * (1.0 - value / bound)
        for name, value in ours.items()
        if name.endswith(" unskew") and value is not None and (bound := ours[name.removesuffix("unskew") + "capacity"])
    ]
    return sum(gaps) / len(gaps)


def _wrong_estimates(bench: Bench, seeds: int) -> Iterator[Figure]:
    """What it costs when speeds, delays and costs are wrong by up to 10 % without the planner's knowing."""
    job, law = JOBS["llama2-13b"], FaultLaw(mtbf_s=7200.0, repair_s=3600.0, slow_per_100_hours=40.0)
    loss = []
    for seed in bench.steps("wrong estimates", range(seeds)):
        cluster_events = arrivals(job, law, hours=12.0, seed=seed)
        right, wrong = (
            simulate(
                job, POLICIES["unskew"](), cluster_events, SimulationOptions(hours=12.0, seed=seed, estimate_error=error)
            ).effective
            for error in (0.0, 0.1)
        )
        loss.append(100.0 * (right - wrong))
    mean = sum(loss) / len(loss)
    yield figure("loss when beliefs are wrong by 10 %", mean, "points", better="lower", note="effective time")
