"""Predictor, causes and what-if on real data: ByteDance's published traces, real CPU chunks, the sleeping device, the clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean, median

import msgspec
import numpy as np
import polars as pl
import torch
from support import datasets

from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.iteration import Chunk
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.diagnosis.causes import named
from unskew.analytics.diagnosis.ranks.slow_ranks import follow_section
from unskew.analytics.diagnosis.trace.lost import time_lost
from unskew.analytics.diagnosis.trace.model import from_operations
from unskew.analytics.diagnosis.trace.section import TraceSection, fit_curve, record, without_lengths
from unskew.analytics.diagnosis.trace.whatif import what_if
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.predictor.fit import fit
from unskew.benchmarks.report import Figure, figure, median_ms
from unskew.benchmarks.runs import EIGHT_RANKS, Bench
from unskew.collector.events import IterationJudged
from unskew.runtime.model.model import Layer, build_layer
from unskew.runtime.rank.device import ChunkOf, RealDevice
from unskew.runtime.size import ModelSize

FILES = {"ST": "ops-ST.parquet", "SE": "ops-SE-windows12.parquet"}
ABSENT = "data set bytedance-straggler is absent: set UNSKEW_DATASETS"
SIZE = ModelSize(n_layers=6, dim=128, heads=4)
"""The chunk that is measured for real: layers 1 to 4 of these, without embedding and head."""
LAYERS = 4
MIXES, REPEATS = 24, 9
SEED = 20_261_121
SLEEPING_SEEDS = range(3)


def figures(bench: Bench) -> list[Figure]:
    """All of them."""
    return [*published(), *real_chunks(), *sleeping_device(bench), *clock()]


def published() -> list[Figure]:
    """ByteDance's SE and ST, against what the authors published of them."""
    found: list[Figure] = []
    for job, cause in (("SE", "long_sequences"), ("ST", "stage_imbalance")):
        path, table = (
            datasets.find("bytedance-straggler", FILES[job]),
            datasets.find("bytedance-straggler", "expected-steps.csv"),
        )
        if path is None or table is None:
            found.append(figure(f"ByteDance {job}", None, "", better="lower", note=ABSENT))
            continue
        section = without_lengths(record(from_operations(pl.read_parquet(path))))
        ours = what_if(section.recording)
        steps = (
            pl.read_csv(table).filter((pl.col("job") == job) & pl.col("step").is_in(list(ours.iteration_slowdown))).sort("step")
        )
        off = max(
            abs(us / them - 1) for us, them in zip(ours.iteration_slowdown.values(), steps["slowdown"].to_list(), strict=True)
        )
        flagged = follow_section(section, DetectorOptions()).verdicts
        lost = time_lost(section, flagged)
        causes = [verdict.cause for verdict in named([(section, lost)], 1, "")]
        n = f"{len(ours.iteration_slowdown)} steps"
        share = {name: f"{100 * us.sum() / lost.measured_us.sum():.1f} %" for name, us in lost.causes.items() if us.any()}
        found += [
            figure(
                f"ByteDance {job}: slowdown per step against the published, worst", 100 * off, "%", bar=0.5, better="lower",
                note=n,
            ),
            figure(f"ByteDance {job}: devices accused", len(flagged), "", bar=0, better="lower", note=n),
            figure(
                f"ByteDance {job}: cause {cause} and no other", float(causes == [cause]), "", bar=1, better="higher",
                note=f"named: {', '.join(causes) or 'none'}; of the time: {share}, unexplained "
                f"{100 * lost.unexplained_us.sum() / lost.measured_us.sum():.1f} %",
            ),
            figure(
                f"ByteDance {job}: replay against measured steps, mean error", 100 * ours.simulator_error, "%",
                better="lower", note="without launch delays; shown beside every what-if",
            ),
        ]  # fmt: skip
        if job == "SE":
            found += predicted_from_peers(section)
    return found


def predicted_from_peers(section: TraceSection) -> list[Figure]:
    """One stage from the other, backward from forward: learned on the even steps, tested on the odd ones."""
    work = section.parts.work_us
    pairs = {
        "stage 0 predicts stage 1": [((kind, 0), (kind, 1)) for kind in "FB"],
        "forward predicts backward": [(("F", stage), ("B", stage)) for stage in section.stages],
    }
    found = []
    for name, of in pairs.items():
        errors = {}
        for source, target in of:
            x, y = work[section.cells[source]], work[section.cells[target]]
            scale = float(np.median(x[:, ::2]))
            curve = fit_curve((x[:, ::2] / scale).ravel(), y[:, ::2].ravel())
            errors[f"{source[0]}{source[1]}->{target[0]}{target[1]}"] = float(
                np.abs(curve(x[:, 1::2] / scale) / y[:, 1::2] - 1).mean()
            )
        note = ", ".join(f"{pair} {100 * error:.2f} %" for pair, error in errors.items())
        found.append(
            figure(
                f"SE: {name}, mean error",
                100 * fmean(errors.values()),
                "%",
                bar=3,
                better="lower",
                note=f"{note}; on steps not fitted",
            )
        )
    return found


def real_chunks() -> list[Figure]:
    """Chunks of one CPU core: prediction error on mixes of lengths that were not fitted, beside the noise of repeats."""
    torch.set_num_threads(1)
    layers = [
        build_layer(SIZE, number, seed=SEED, dtype=torch.float32, device=torch.device("cpu")) for number in range(1, 1 + LAYERS)
    ]
    draw, device = random.Random(SEED), RealDevice([])
    mixes = [tuple(draw.randint(16, 256) for _ in range(draw.randint(1, 6))) for _ in range(MIXES)]
    turns = [mix for _ in range(REPEATS) for mix in mixes]
    for mix in mixes:  # the first of each size pays for memory
        _chunk(layers, mix, device)
    draw.shuffle(turns)
    measured: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for mix in turns:
        measured.setdefault(mix, []).append(_chunk(layers, mix, device))
    found = []
    for index, kind in enumerate("FB"):
        times = {mix: [pair[index] for pair in pairs] for mix, pairs in measured.items()}
        noise = fmean(abs(us / median(of) - 1) for of in times.values() for us in of)
        learned, tested = mixes[::2], mixes[1::2]
        model = fit([Chunk(0, kind, LAYERS, False, work_of(mix), float(us)) for mix in learned for us in times[mix]]).model
        ratios = [model.chunk_us(kind, work_of(mix), LAYERS, has_head=False) / us for mix in tested for us in times[mix]]
        error = fmean(abs(ratio - 1) for ratio in ratios)
        found.append(
            figure(
                f"real CPU chunks, {kind}: prediction error less the noise of repeats", 100 * (error - noise), "points", bar=1,
                better="lower", note=f"error {100 * error:.2f} %, noise {100 * noise:.2f} %; {len(tested)} mixes not "
                f"fitted, {REPEATS} times each",
            )
        )  # fmt: skip
    return found


def _chunk(layers: Sequence[Layer], mix: tuple[int, ...], device: RealDevice) -> tuple[int, int]:
    """Microseconds of a forward and a backward pass over documents of these lengths."""
    x = torch.randn(sum(mix), SIZE.dim, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y, mix)
        return y

    work = work_of(mix)
    y, first = device.run(ChunkOf("F", 0, LAYERS, False, work, 0), forward)
    gradient = torch.randn_like(y)

    def backward() -> torch.Tensor:
        torch.autograd.backward(y, gradient)
        return y

    _, second = device.run(ChunkOf("B", 0, LAYERS, False, work, 0), backward)
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return first().compute_us, second().compute_us


def sleeping_device(bench: Bench) -> list[Figure]:
    """Healthy runs of eight ranks: each iteration against its prediction, made before it was learned from."""
    errors, covered = [], []
    for seed in bench.steps("predicted iterations, sleeping device", SLEEPING_SEEDS):
        run = bench.run(msgspec.structs.replace(EIGHT_RANKS, device="sleep", seed=seed, iterations=60))
        judged = [event for event in run.of(IterationJudged) if event.predicted_us is not None and event.log_complete]
        errors += [abs((event.predicted_us or 0) / event.measured_us - 1) for event in judged]
        covered += [one.measured_us / one.healthy_us for event in judged for one in event.ranks if one.healthy_us]
    note = (
        f"{len(errors)} iterations of {len(SLEEPING_SEEDS)} runs after warm-up; worst {100 * max(errors):.1f} %"
        if errors
        else "none judged"
    )
    return [
        figure("sleeping device: predicted iteration, mean error", 100 * fmean(errors) if errors else None, "%", bar=2.5,
               better="lower", note=note),
        figure("sleeping device: a rank's chunks over their prediction, mean", fmean(covered) if covered else None, "",
               better="lower", note="1 = as predicted"),
    ]  # fmt: skip


def clock() -> list[Figure]:
    """How long a prediction takes."""
    plan = uniform_plan(tp=1, pp=4, dp=1, n_layers=16, micro_batches=8)
    draw = random.Random(SEED)
    works = [work_of([draw.randint(20, 200) for _ in range(4)]) for _ in plan.routes]
    cost = profile("steady")
    return [
        figure(
            "predict_iteration at PP4 x 8 micro-batches, median", median_ms(lambda: predict_iteration(plan, works, cost), 200),
            "ms", bar=5, better="lower", note="schedule known, as in the loop",
        )
    ]  # fmt: skip
