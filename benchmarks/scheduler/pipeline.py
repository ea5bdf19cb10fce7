"""The pipeline model's figures: known makespans, speed of the timeline, AdaPtis against its baselines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import exp, log
from statistics import fmean

import numpy as np

from unskew.analytics.core.plan import PASSES, splits_backward
from unskew.analytics.pipeline.bubbles import bubbles
from unskew.analytics.pipeline.model_profiles import MODELS
from unskew.analytics.pipeline.schedule import per_hop, pipeline_of
from unskew.analytics.planners.adaptis.task import AdaptisResult, AdaptisTask
from unskew.analytics.planners.adaptis.tune import BASELINES, gains, tune
from unskew.benchmarks.report import Figure, figure, median_ms
from unskew.benchmarks.runs import Bench

ORACLES = ((4, 8, 33, 27), (8, 8, 45, 31), (2, 4, 15, 13))
"""(stages, micro-batches, makespan of 1F1B, of ZB-H1) with F = B = W = 1."""
SHAPES = ((4, 8), (8, 16), (8, 32))
"""(devices, micro-batches) on which every profile is tuned; one more task has a device at half speed."""
PAPER_MEAN_GAIN = 1.42


def figures(_bench: Bench) -> Iterator[Figure]:
    """Every figure, in the order in which they are measured."""
    yield from oracle_figures()
    yield from speed_figures()
    yield from adaptis_figures()


def oracle_figures() -> Iterator[Figure]:
    """Makespans that are known to the digit."""
    for name, column in (("1f1b", 2), ("zb-h1", 3)):
        wrong = max(abs(unit_makespan(name, case[0], case[1]) - case[column]) for case in ORACLES)
        yield figure(
            f"{name}: largest error over known makespans", wrong, "chunks", bar=0.0, better="lower",
            note=", ".join(f"{unit_makespan(name, s, m):g} at ({s},{m})" for s, m, _, _ in ORACLES),
        )  # fmt: skip
    whole = unit_makespan("zb-v", 8, 32)
    yield figure(
        "zb-v: idle chunks at (8,32), F = B = W", 2 * (whole - 96), "half chunks", bar=7.0, better="lower",
        note="7 is what filling the pipeline takes",
    )  # fmt: skip


def unit_makespan(name: str, ranks: int, micro_batches: int) -> float:
    """F = B = W = 1 per rank and micro-batch."""
    chunks = pipeline_of(name, ranks=ranks, micro_batches=micro_batches)
    share = 1.0 / PASSES[name]
    costs = [share, share, share] if splits_backward(name) else [share, 2 * share]
    return float(chunks.makespan_us(per_hop(chunks, np.tile(np.array(costs)[:, None], ranks * PASSES[name]))))


def speed_figures() -> Iterator[Figure]:
    """How long a timeline takes."""
    large = pipeline_of("1f1b", ranks=16, micro_batches=64)
    many = np.random.default_rng(0).uniform(1.0, 2.0, (len(large), 64))
    yield figure(
        "timeline of PP16 x 64 micro-batches x 64 replicas", median_ms(lambda: large.run(many, 0.1), 20), "ms", bar=100.0,
        better="lower", note="start and end of every chunk; all durations differ",
    )  # fmt: skip
    start, end = large.run(many, 0.1)
    yield figure("its bubbles, classed", median_ms(lambda: bubbles(large, start, end), 10), "ms", better="lower")
    small = pipeline_of("1f1b", ranks=4, micro_batches=8)
    costs = np.array([[1.0, 1.2, 0.9, 1.1], [2.0, 2.4, 1.8, 2.2]])
    ms = median_ms(lambda: small.makespan_us(per_hop(small, costs)), 500)
    yield figure("makespans a second, PP4 x 8 micro-batches, one at a time", 1000.0 / ms, "1/s", better="higher")
    candidates = np.random.default_rng(0).uniform(1.0, 2.0, (2, 4, 1000))
    ms = median_ms(lambda: small.makespan_us(per_hop(small, candidates)), 20)
    yield figure("the same, 1,000 candidates in one pass", 1e6 / ms, "1/s", better="higher")


def adaptis_figures() -> Iterator[Figure]:
    """AdaPtis on every profile and shape, and on a pipeline with a slow device."""
    over_best, over_interleaved, gaps, seconds = [], [], [], []
    for name, model in MODELS.items():
        for devices, micro_batches in SHAPES:
            for slow in ((), ((devices // 2, 0.5),)) if devices == 4 else ((),):
                begun = time.perf_counter()
                found = tune(
                    AdaptisTask(
                        costs_us=model.costs_us(),
                        speeds=_speeds(devices, slow),
                        micro_batches=micro_batches,
                        kept=model.kept_bytes(),
                    )
                )
                seconds.append(time.perf_counter() - begun)
                gained = gains(found)
                over_best.append(min(gained[baseline] for baseline in BASELINES))
                over_interleaved.append(gained["interleaved"])
                gaps.append(gained["bound"])
                where = f"{name}, PP{devices} x {micro_batches}{', one device at half speed' if slow else ''}"
                yield figure(
                    f"AdaPtis over interleaved 1F1B: {where}",
                    gained["interleaved"],
                    "x",
                    better="higher",
                    note=_summary(found),
                )
    yield figure("AdaPtis over the best of its baselines, worst task", min(over_best), "x", bar=1.0, better="higher")
    yield figure(
        "AdaPtis over interleaved 1F1B, geometric mean", exp(fmean(map(log, over_interleaved))), "x",
        better="higher", note=f"the paper's mean over its own models and cluster: {PAPER_MEAN_GAIN}",
    )  # fmt: skip
    yield figure(
        "AdaPtis: time over a lower bound, mean", fmean(gaps), "x", better="lower",
        note=f"worst {max(gaps):.3f}; no plan at all can be below 1",
    )  # fmt: skip
    yield figure("AdaPtis: one search", fmean(seconds), "s", better="lower", note=f"longest {max(seconds):.1f} s")


def _speeds(count: int, slow: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Healthy devices but for these (device, speed)."""
    return tuple(dict(slow).get(device, 1.0) for device in range(count))


def _summary(found: AdaptisResult) -> str:
    gained = gains(found)
    others = ", ".join(f"{name} {gained[name]:.3f}" for name in BASELINES if name != "interleaved")
    return f"over {others}; {gained['bound']:.3f} x the lower bound; {len(found.layout.sizes)} stages"
