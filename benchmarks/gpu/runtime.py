"""Our trainer on one GPU: chunks and the predictor, several ranks that share it by Gloo, the loop, what instrumenting costs.

All in float32 at torch's default precision, or float64 where losses are compared: the runtime has no bfloat16. NCCL refuses two
ranks on one device, so of NCCL there is a group of one rank alone, which is no measurement of several GPUs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.predictor.fit import expected_us, fit
from unskew.benchmarks.gpu.at_hand import apart, gpu_name, no_gpu, within
from unskew.benchmarks.gpu.chunks import MIDDLE, LengthTimes, span_us, sums_by_nccl, times_of
from unskew.benchmarks.loop.overhead import SKIPPED_PAIRS, interval, paired
from unskew.benchmarks.loop.slow import detection, errors_of_plans, seen_in
from unskew.benchmarks.report import Figure, digits, figure
from unskew.benchmarks.runs import Bench, FinishedRun, done, loss_difference, tried
from unskew.collector.events import (
    CHUNK_KINDS,
    Event,
    FaultInjected,
    IterationCommitted,
    IterationJudged,
    PlanApplied,
    PredictorFitted,
    Regrouped,
    Span,
)
from unskew.collector.paths import Store
from unskew.runtime.options import RunOptions

LENGTHS = (128, 512, 2_048, 4_096, 8_192, 16_384)
LEARNED: tuple[tuple[int, ...], ...] = (*((length,) for length in LENGTHS), (512,) * 32, (4_096,) * 4)
HELD_OUT: tuple[tuple[int, ...], ...] = (
    *((length,) for length in (256, 1_024, 3_072, 6_144, 12_288)), (128,) * 128, (2_048,) * 8, (8_192,) * 2,
)  # fmt: skip
"""The predictor is fitted to the first ones and tested on these: single documents, and 16,384 tokens of equal ones."""

SHARED = RunOptions(
    device="gpu", pp=2, dp=2, layers=8, dim=512, heads=8, tokens=4_096, micro_batches=8, iterations=40, checkpoint_every=0,
    mode="observe", respawns=0,
)  # fmt: skip
"""Four ranks, four layers of 3 million parameters each a stage, 50 MB of gradients."""
ALONE = msgspec.structs.replace(SHARED, pp=1, dp=1, micro_batches=4)
SMALL = msgspec.structs.replace(SHARED, dim=128, heads=4, tokens=256, iterations=24, dtype="float64")
FROM = 15
"""Iterations count from here on: the predictor is fitted to the first eight."""
AT, FACTOR, SLOWED_ITERATIONS = 15, 2.0, 70
KILLED_AT = 12
PAIRS = 140
GRADIENTS = (50_000_000, 200_000_000)
ROUNDED_US = 20


def figures(bench: Bench) -> Iterator[Figure]:
    """Part by part, each figure on stderr as soon as it is there: the machine may be lent for minutes only."""
    if reason := no_gpu():
        yield figure("gpu: our trainer", None, "", better="lower", note=reason)
        return
    parts: dict[str, Callable[[Bench], Iterator[Figure]]] = {
        "chunks": chunks, "losses": losses, "iterations": iterations, "slow": slow, "overhead": overhead, "nccl": nccl,
    }  # fmt: skip
    for name in bench.steps(gpu_name(), tuple(parts)):
        print(f"{time.strftime('%X')} {name}", file=sys.stderr, flush=True)
        for one in tried(f"gpu: {name}", partial(parts[name], bench)):
            value = "not measured" if one.value is None else f"{digits(one.value)} {one.unit}"
            print(f"{time.strftime('%X')} {one.name}: {value}; {one.note}", file=sys.stderr, flush=True)
            yield one


def chunks(_: Bench) -> Iterator[Figure]:
    """Forward and backward of two layers by the length of documents, and the predictor's error on lengths that it has not
    seen."""
    timed = apart(partial(times_of, (*LEARNED, *HELD_OUT)), 90)
    for one in timed:
        if one.lengths in [(length,) for length in LENGTHS]:
            yield figure(
                f"gpu: forward of two layers of 50M parameters, a document of {one.lengths[0]:,} tokens",
                median(one.forward_us) / 1e3, "ms", better="lower",
                note=f"{gpu_name()}, float32, by CUDA events; backward {median(one.backward_us) / 1e3:.2f} ms",
            )  # fmt: skip
    yield from errors_on(timed[: len(LEARNED)], timed[len(LEARNED) :])


def errors_on(learned: Sequence[LengthTimes], held_out: Sequence[LengthTimes]) -> Iterator[Figure]:
    """The shipped predictor, fitted to the first and tested on the second."""
    model = fit([chunk for one in learned for chunk in one.chunks]).model
    for kind in ("F", "B"):
        errors = {_named(one.lengths): _error(model, one, kind) for one in held_out}
        own = [_error(model, one, kind) for one in learned]
        yield figure(
            f"gpu: predictor, {kind}: mean error on lengths that it has not seen", 100 * fmean(map(abs, errors.values())), "%",
            better="lower",
            note=f"{', '.join(f'{name}: {100 * error:+.1f} %' for name, error in errors.items())}; on those it was fitted to "
            f"{100 * fmean(map(abs, own)):.1f} %; {len(MIDDLE)} layers",
        )  # fmt: skip


def _error(model: CostModel, one: LengthTimes, kind: str) -> float:
    """Predicted over the median measured, less 1."""
    chunk, *_ = of_kind = [chunk for chunk in one.chunks if chunk.kind == kind]
    return expected_us(model, chunk) / median(each.us for each in of_kind) - 1


def _named(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} x {lengths[0]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"


def losses(bench: Bench) -> Iterator[Figure]:
    """Four ranks that share the GPU against the same four on CPU cores, and with one of them killed."""
    with within(60):
        reference = bench.run(msgspec.structs.replace(SMALL, device="virtual"))
    with within(60):
        undisturbed = bench.run(SMALL)
    what = f"PP2 x DP2 on one GPU, float64, {SMALL.iterations} iterations"
    yield done("gpu: ranks share it by Gloo", [undisturbed], what)
    yield figure(
        "gpu: ranks share it by Gloo: largest difference of any iteration's loss from CPU cores, float64",
        loss_difference(undisturbed, reference.summary.losses), "nats", bar=1e-8, better="lower", note=what,
    )  # fmt: skip
    seen_s: dict[str, float] = {}

    def watch(_: Store, event: Event) -> None:
        if isinstance(event, FaultInjected) or (isinstance(event, Regrouped) and event.plan_version > 0):
            seen_s.setdefault(type(event).__name__, time.monotonic())

    with within(60):
        killed = bench.run(msgspec.structs.replace(SMALL, mode="auto"), f"kill:rank=1,at={KILLED_AT}", watch=watch)
    seconds = [event.seconds for event in killed.of(Regrouped) if event.plan_version > 0]
    yield done("gpu: kill -9 of a rank", [killed], what)
    yield figure(
        "gpu: kill -9: largest difference of any iteration's loss from the failure-free run, float64",
        loss_difference(killed, undisturbed.summary.losses), "nats", bar=1e-8, better="lower", note=what,
    )  # fmt: skip
    yield figure(
        "gpu: kill -9: from the death until all survivors have regrouped", 1e3 * seconds[0] if seconds else None, "ms",
        bar=500, better="lower", note=f"the death as the kernel reports it to the parent; {len(seconds)} regroupings",
    )  # fmt: skip
    yield figure(
        "gpu: kill -9: the same from the signal on", 1e3 * (max(seen_s.values()) - min(seen_s.values())) if seconds else None,
        "ms", better="lower", note="before it reports the death the kernel gives back the rank's CUDA context",
    )  # fmt: skip
    yield figure(
        "gpu: kill -9: (layer, micro-batch, F or B) not executed exactly once per committed iteration", killed.not_once, "",
        bar=0, better="lower",
    )  # fmt: skip


def iterations(bench: Bench) -> Iterator[Figure]:
    """Predicted against measured, of a rank with the GPU to itself and of four that share it."""
    with within(60):
        run = bench.run(ALONE)
    yield from _predicted("one rank", run, bar=3.0)
    with within(75):
        run = bench.run(SHARED)
    yield from _predicted("PP2 x DP2 that share it by Gloo", run, bar=None)


def _predicted(who: str, run: FinishedRun, bar: float | None) -> Iterator[Figure]:
    judged = [one for one in run.of(IterationJudged) if one.iteration >= FROM and one.predicted_us is not None]
    errors = [abs((one.predicted_us or 0) / one.measured_us - 1) for one in judged]
    took = [commit.wall_us / 1e3 for commit in run.of(IterationCommitted) if commit.iteration >= FROM]
    own = {kind: percent for fitted in run.of(PredictorFitted) for kind, percent in fitted.error_percent.items()}
    kinds = ", ".join(f"{kind} {percent:.1f} %" for kind, percent in own.items())
    shares = "" if bar else "; the predictor knows no sharing of a GPU: it takes chunks for as long as they were"
    yield figure(
        f"gpu: predicted against measured iteration, {who}: median error", 100 * median(errors) if errors else None, "%",
        bar=bar, better="lower",
        note=run.failure or f"{len(errors)} iterations of {median(took):.0f} ms, worst {100 * max(errors, default=0.0):.1f} %; "
        f"its own errors {kinds}{shares}",
    )  # fmt: skip
    yield figure(
        f"gpu: chunks, {who}: spans of a rank that overlap", _overlapping(run), "", bar=0, better="lower",
        note=f"by more than {ROUNDED_US} us, in one iteration",
    )  # fmt: skip


def _overlapping(run: FinishedRun) -> int:
    """Chunks that begin before the one before has ended, on the same rank: the GPU's stream executes one after the other."""
    of_rank: dict[tuple[int, int | None], list[Span]] = {}
    for span in run.of(Span):
        if span.kind in CHUNK_KINDS:
            of_rank.setdefault((span.rank, span.iteration), []).append(span)
    pairs = [pair for spans in of_rank.values() for pair in pairwise(sorted(spans, key=lambda span: span.start_us))]
    return sum(one.start_us + one.wall_us > following.start_us + ROUNDED_US for one, following in pairs)


def slow(bench: Bench) -> Iterator[Figure]:
    """One of the four ranks takes twice as long: named, and what is the plan that follows?"""
    with within(90):
        options = msgspec.structs.replace(SHARED, iterations=SLOWED_ITERATIONS, mode="auto")
        run = bench.run(options, f"slow:rank=1,factor={FACTOR:g},at={AT}")
    title = f"gpu: slow x{FACTOR:g}, ranks share it by Gloo"
    errors = errors_of_plans([run])
    yield done(title, [run])
    yield from detection([seen_in(run)], title, within=40, bar=1)
    yield figure(f"{title}: changes of plan", len(run.of(PlanApplied)) - 1, "", better="higher")
    yield figure(
        f"{title}: predicted against measured iteration after the change", 100 * median(errors) if errors else None, "%",
        better="lower", note=f"{len(errors)} plans scored",
    )  # fmt: skip


def overhead(bench: Bench) -> Iterator[Figure]:
    """One rank with the GPU to itself, iterations with and without instrumentation in turns; and a span's own cost."""
    with tempfile.TemporaryDirectory(prefix="unskew-corpus-") as folder, within(75):
        # Documents of equal length, so that iterations are alike.
        (Path(folder) / "corpus.txt").write_bytes(b"".join(b"%063d\n" % number for number in range(20_000)))
        options = msgspec.structs.replace(ALONE, corpus=folder, instrument_turns=1, iterations=2 * (PAIRS + SKIPPED_PAIRS))
        run = bench.run(options)
    differences, off_us = paired(run)
    low, high = interval(differences)
    yield figure(
        "gpu: instrumentation and spool, of the iteration", 100 * median(differences), "%", bar=1, better="lower",
        note=f"95 % interval {100 * low:.2f} to {100 * high:.2f} %; {len(differences)} pairs of iterations with and without; "
        f"one rank, {off_us / 1e3:.1f} ms an iteration without; events are recorded in both",
    )  # fmt: skip
    chunk_us = apart(span_us, 40)
    spans = len(run.of(Span)) / (options.iterations / 2)
    yield figure(
        "gpu: the same by CPU time, span by span, events with it", 100 * chunk_us * spans / off_us, "%", bar=1, better="lower",
        note=f"{chunk_us:.1f} us each, {spans:.0f} an iteration of {off_us / 1e3:.1f} ms",
    )  # fmt: skip


def nccl(_: Bench) -> Iterator[Figure]:
    """What of a sum the stream waits for, in a group of one rank."""
    for one in apart(partial(sums_by_nccl, GRADIENTS), 60):
        of = f"{one.n_bytes / 1e6:.0f} MB"
        yield figure(
            f"gpu: NCCL, a group of one rank, all-reduce of {of}: exposed", one.alone_ms, "ms", better="lower",
            note="by CUDA events around Work.wait; nothing travels: the wait's own cost, no measurement of several GPUs; "
            f"behind a product of {one.work_ms:.1f} ms it is {one.beside_ms:.3f} ms",
        )  # fmt: skip
        yield figure(
            f"gpu: gradients of {of} to the host, for Gloo", one.to_host_ms, "ms", better="lower",
            note=f"pageable memory; and back {one.from_host_ms:.1f} ms",
        )  # fmt: skip
