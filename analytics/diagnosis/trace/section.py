"""A stretch of a run under one plan, ready to be asked what if: a recording, and what its chunks should have taken.

Where lengths are logged, the cost model predicts what a chunk should have taken; where no plan says which layers it held (a run
of ours that was exported and imported) a line in tokens and squared lengths, per kind and place. Else workload is inferred: the
same micro-batch costs much or little on every stage, forward and backward, so what its other chunks took shows what a chunk
should take. Steps, for chunk times t[kind, stage, micro-batch] (micro-batches of all iterations and replicas in a row):

1. a standard score per kind and place (a stage, or each of its ranges of layers):
   ``z = (t - median) / (1.4826 x median distance from it)``;
2. a chunk's workload is the mean z of the same micro-batch on the other stages, where there is one stage only of its other
   kinds. A z counts as far as another chunk of the micro-batch confirms it (`_confirmed`): one that was held up makes no
   other chunk expected to be long;
3. expected time: ``c0 + c1 z + c2 z^2``, robust relative least squares (Huber) per kind and place, within the range of the
   times that were fitted. The square, because backward grows faster with the length of documents than forward.

Before that, ranks that are slow are found (slowness.py), and what they took longer for it is taken out: they neither make their
micro-batches look long nor their stage costly. Inference does not see a slow stage (that is its normal), nor, with one stage, a
device whose forward and backward are slow alike; of a whole replica that is slow see replicas.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.diagnosis.slowness.places import Rows, Slowness
from unskew.analytics.diagnosis.slowness.search import slowness_of
from unskew.analytics.diagnosis.trace import streams, turns
from unskew.analytics.diagnosis.trace.model import Trace
from unskew.analytics.diagnosis.trace.replay import OperationDurations, TraceRecording, take_apart
from unskew.analytics.pipeline.dag import Array
from unskew.analytics.pipeline.prediction import model_for
from unskew.collector.events import CHUNK_KINDS

KIND: dict[str, str] = {"forward-compute": "F", "backward-compute": "B", **{kind: kind for kind in CHUNK_KINDS}}
"""Kinds of operations that are chunks of work -> the kind of work."""
Indices = NDArray[np.intp]
Works = Mapping[int, Mapping[int, Work]]
"""Iteration -> micro-batch -> its work."""

HUBER = 1.5
ROUNDS = 15
LEAST_US = 1e-3
DEFAULT_OPTIONS = DetectorOptions()
CONFIRMED = 2.0
"""So much more may a kind of work vary with length than another."""
CORRELATED = 0.99
"""Of the micro-batches these say whether forward and backward go together: not the few that are confirmed least."""
LEAST_CHUNKS = 8
"""With fewer micro-batches than this nothing is inferred: three coefficients would fit noise."""


class TraceSection(msgspec.Struct, frozen=True, dict=True):
    """`expected_us` [operation, iteration]: what a healthy device of the stage takes for the chunk's workload; NaN for other
    operations. `lengths_logged` False: inferred from peers; `by_model`: by one cost model for all stages, else of each by
    itself. `correlation`: of forward with backward times over micro-batches. `plan_version`: of the plan (0 in an imported
    run); `uneven`: it gives ranks unequal work on purpose. Where workload is
    inferred: `slowness` of ranks, which of several stages is estimated with it (its numbers are places in `stages` and
    `replicas`), and `smallest_replica_slowdown`, from which on a whole replica would have been told from its micro-batches;
    None = not at all."""

    recording: TraceRecording
    expected_us: Array
    lengths_logged: bool
    by_model: bool = False
    correlation: float | None = None
    plan_version: int = 0
    uneven: bool = False
    slowness: Slowness = Slowness()
    smallest_replica_slowdown: float | None = None

    @cached_property
    def parts(self) -> OperationDurations:
        return take_apart(self.recording)

    @cached_property
    def cells(self) -> dict[tuple[str, int], Indices]:
        """(kind of work, stage) -> the operations that are its chunks."""
        found: dict[tuple[str, int], list[int]] = {}
        for i, operation in enumerate(self.recording.graph.operations):
            if operation.micro_batch is not None:
                found.setdefault((KIND[operation.kind], operation.stage), []).append(i)
        return {cell: np.array(members) for cell, members in sorted(found.items())}

    @cached_property
    def places(self) -> dict[tuple[str, tuple[int, int]], Indices]:
        """(kind of work, (stage, first layer)) -> its chunks: a cell's, apart where a stage holds several ranges of layers."""
        found: dict[tuple[str, tuple[int, int]], list[int]] = {}
        for (kind, stage), members in self.cells.items():
            for i in members.tolist():
                first, _ = self.recording.graph.operations[i].layers or (0, 0)
                found.setdefault((kind, (stage, first)), []).append(i)
        return {place: np.array(members) for place, members in sorted(found.items())}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({kind for kind, _ in self.cells}))

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted({stage for _, stage in self.cells}))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        return tuple(sorted({operation.replica for operation in self.recording.graph.operations}))

    @cached_property
    def rank_at(self) -> dict[tuple[int, int], int]:
        """(stage, replica) -> the rank that executes it."""
        chunks = (o for o in self.recording.graph.operations if o.micro_batch is not None)
        return {(operation.stage, operation.replica): operation.rank for operation in chunks}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({operation.rank for operation in self.recording.graph.operations}))


def record(trace: Trace) -> TraceRecording:
    """A trace under one plan as a recording, by the rule that the trace names. Raises `GraphError` where it does not show what
    waits for what."""
    recording = streams.record(trace) if trace.streams else turns.record(trace)
    recording.graph.dag  # noqa: B018 - a circle is found here, where it is said, and not by whoever asks first
    return recording


def with_lengths(recording: TraceRecording, works: Mapping[int, Sequence[Work]], cost: CostModel, plan: Plan) -> TraceSection:
    """A section whose chunks should take what `cost` predicts for their lengths, `works[iteration][micro-batch]`; the predictor
    of the run may have seen whole backward passes alone, where the plan splits them."""
    operations, cost = recording.graph.operations, model_for(cost, plan.schedule)
    n_layers = max((sum(operation.layers) for operation in operations if operation.layers is not None), default=0)
    expected = np.full_like(recording.wall_us, np.nan)
    for i, operation in enumerate(operations):
        if operation.layers is None or operation.micro_batch is None:
            continue
        first, count = operation.layers
        rank = operation.rank
        has_head, place = first + count == n_layers, cost.place_of(rank, len(plan.team_of.get(rank, (rank,))))
        again = rank in plan.role_of and plan.recomputes(rank, operation.kind)
        for column, iteration in enumerate(recording.iterations):
            work = works[iteration][operation.micro_batch] if iteration in works else work_of(())
            us = cost.chunk_us(operation.kind, work, count, has_head=has_head, place=place, again=again)
            expected[i, column] = max(us * plan.weight_of.get(rank, 1.0), 1e-3)
    uneven = plan.division is not None and bool(plan.division.fewer)
    return TraceSection(recording, expected, lengths_logged=True, by_model=True, plan_version=plan.plan_version, uneven=uneven)


def without_lengths(
    recording: TraceRecording, options: DetectorOptions = DEFAULT_OPTIONS, works: Works | None = None
) -> TraceSection:
    """A section without a cost model, and with several stages the slowness of its ranks: its workload is inferred from peers,
    where `works` does not have it of every micro-batch. Raises `ValueError` when that cannot be done."""
    bare = TraceSection(recording, np.full_like(recording.wall_us, np.nan), lengths_logged=False)
    operations = recording.graph.operations
    batches = sorted({(o.replica, o.micro_batch) for o in operations if o.micro_batch is not None})
    column = {batch: i for i, batch in enumerate(batches)}
    places = sorted({place for _, place in bare.places})
    index = np.full((len(bare.kinds), len(places), len(batches)), -1)
    for (kind, place), members in bare.places.items():
        for i in members:
            at = column[operations[i].replica, operations[i].micro_batch]
            index[bare.kinds.index(kind), places.index(place), at] = i
    if (index < 0).any():
        raise ValueError("not every micro-batch ran on every stage, so its workload cannot be inferred from peers")
    times = (bare.parts.work_us - recording.within_us)[index]  # [kind, place, micro-batch, iteration]
    stage_of, replica_of = [stage for stage, _ in places], [bare.replicas.index(replica) for replica, _ in batches]
    slowness = Slowness()
    if len(bare.stages) > 1:
        slowness = _slowness(times, [bare.stages.index(stage) for stage in stage_of], replica_of, options)
        for one in slowness.named:
            if one.who.is_replica:
                continue
            stages = [bare.stages[stage] for stage in one.who.stages]
            mine = np.ix_(np.isin(stage_of, stages), np.isin(replica_of, one.who.replicas))
            for number, level in enumerate(one.levels):
                times[number][*mine, one.begin : one.end] /= np.exp(level)
    expected, times = bare.expected_us.copy(), times.reshape(*index.shape[:2], -1)
    if (known := _known(works or {}, recording.iterations, [micro_batch for _, micro_batch in batches])) is not None:
        expected[index] = by_lengths(times, known).reshape(*index.shape, -1)
        return msgspec.structs.replace(bare, expected_us=expected, lengths_logged=True, slowness=slowness)
    found = infer(times, bare.kinds, stage_of)
    expected[index] = found.expected_us.reshape(*index.shape, -1)
    return msgspec.structs.replace(bare, expected_us=expected, correlation=found.correlation, slowness=slowness)


def _known(works: Works, iterations: Sequence[int], micro_batches: Sequence[int | None]) -> list[Work] | None:
    """The work of each micro-batch in each iteration, in that order; None where it is not known of all."""
    found = [works.get(iteration, {}).get(one) for one in micro_batches if one is not None for iteration in iterations]
    known = [work for work in found if work is not None]
    return known if known and len(known) == len(found) else None


def _slowness(times_us: Array, stage_of: Sequence[int], replica_of: Sequence[int], options: DetectorOptions) -> Slowness:
    """Of chunks [kind, place, micro-batch, iteration]; stages and replicas as numbers from 0."""
    n_kinds, n_places, _, n = times_us.shape
    logs = np.log(np.maximum(times_us, LEAST_US)).reshape(n_kinds * n_places, len(replica_of), n)
    of_replica = [np.median(logs[:, np.array(replica_of) == replica], axis=1) for replica in sorted(set(replica_of))]
    kind, place = (tuple(numbers.ravel().tolist()) for numbers in np.indices((n_kinds, n_places)))
    return slowness_of(np.stack(of_replica, axis=1), Rows(kind, tuple(stage_of[one] for one in place)), options)


def by_lengths(times_us: Array, works: Sequence[Work]) -> Array:
    """Expected chunk times like those given, [kind, place, micro-batch]: of each kind and place linear in tokens and squared
    lengths. Raises `ValueError` for too few micro-batches."""
    if len(works) < LEAST_CHUNKS:
        raise ValueError(f"what {len(works)} micro-batches should take cannot be learned, at least {LEAST_CHUNKS} are needed")
    lengths = np.array([(work.tokens, work.sum_sq) for work in works], dtype=np.float64)
    lengths /= np.maximum(lengths.max(axis=0), 1.0)
    expected = np.empty_like(times_us)
    for kind, place in np.ndindex(times_us.shape[:2]):
        own = times_us[kind, place]
        constant, *slopes = _robust_line(lengths, own)
        expected[kind, place] = np.clip(constant + lengths @ slopes, own.min(), own.max())
    return np.maximum(expected, 1e-9)


class InferredWorkload(msgspec.Struct, frozen=True):
    """`expected_us` like the times given; `correlation`: of forward's with backward's z over all micro-batches but those that
    are confirmed least, so that one chunk that was held up hides nothing; None without both. Of each z as far as confirmed
    it would be high where many were held up: only those remain large that coincide by chance."""

    expected_us: Array
    workload: Array
    correlation: float | None


def infer(times_us: Array, kinds: tuple[str, ...], stage_of: Sequence[int]) -> InferredWorkload:
    """Expected chunk times from peers: `times_us` [kind, place, micro-batch], `stage_of` [place]; a stage has several places
    where it holds several ranges of layers. Raises `ValueError` for too few micro-batches."""
    n_kinds, n_places, n = times_us.shape
    if n_kinds * n_places == 1:
        raise ValueError("a micro-batch has one chunk only, so its workload cannot be inferred from its other chunks")
    if n < LEAST_CHUNKS:
        raise ValueError(f"the workload of {n} micro-batches cannot be inferred from peers, at least {LEAST_CHUNKS} are needed")
    middle = np.median(times_us, axis=2, keepdims=True)
    spread = 1.4826 * np.median(np.abs(times_us - middle), axis=2, keepdims=True)
    z = (times_us - middle) / np.maximum(spread, 1e-9 + 1e-6 * middle)
    shown = _confirmed(z)
    workload, expected = np.empty_like(z), np.empty_like(z)
    for kind, place in np.ndindex(n_kinds, n_places):
        elsewhere = np.array(stage_of) != stage_of[place]
        of_micro_batch = shown[:, elsewhere].reshape(-1, n) if elsewhere.any() else np.delete(shown[:, place], kind, axis=0)
        shows, own = of_micro_batch.mean(axis=0), times_us[kind, place]
        workload[kind, place] = shows
        expected[kind, place] = np.clip(fit_curve(shows, own)(shows), own.min(), own.max())
    correlation = None
    if {"F", "B"} <= set(kinds):
        usual = np.argsort(np.abs(z - shown).max(axis=(0, 1)))[: int(CORRELATED * n)]
        forward, backward = (z[kinds.index(kind)][:, usual].mean(axis=0) for kind in "FB")
        correlation = float(np.corrcoef(forward, backward)[0, 1]) if forward.std() and backward.std() else 0.0
    return InferredWorkload(np.maximum(expected, 1e-9), workload, correlation)


def _confirmed(z: Array) -> Array:
    """Each z [kind, place, micro-batch], at most `CONFIRMED` times what the most extreme other chunk of the micro-batch shows,
    and 1 more for noise."""
    rows = z.reshape(-1, z.shape[2])
    low, high = (_extreme_of_others(sign * rows) for sign in (-1, 1))
    bounded = np.clip(rows, -1 - CONFIRMED * np.maximum(low, 0), 1 + CONFIRMED * np.maximum(high, 0))
    return np.asarray(bounded.reshape(z.shape))


def _extreme_of_others(rows: Array) -> Array:
    """The largest of the other rows, for each row."""
    second, first = np.partition(rows, (-2, -1), axis=0)[-2:]
    return np.asarray(np.where(rows == first, second, first))


class WorkloadCurve(msgspec.Struct, frozen=True):
    """Chunk time as a function of workload: ``c0 + c1 z + c2 z^2``."""

    coefficients: tuple[float, float, float]

    def __call__(self, workload: Array) -> Array:
        c0, c1, c2 = self.coefficients
        return c0 + c1 * workload + c2 * workload**2


def fit_curve(workload: Array, times_us: Array) -> WorkloadCurve:
    """The robust one."""
    return WorkloadCurve(_robust_line(np.stack([workload, workload**2], axis=1), times_us))


def _robust_line(design: Array, times_us: Array) -> tuple[float, float, float]:
    """Huber regression of relative residuals on two columns: the constant, and what belongs to each."""
    predicted, trust, found = times_us, np.ones(len(times_us)), (0.0, 0.0, 0.0)
    for _ in range(ROUNDS):
        weights = trust / np.maximum(predicted, 1e-9) ** 2
        weights /= weights.sum()
        root, middle, usual_us = np.sqrt(weights), weights @ design, weights @ times_us
        c1, c2 = np.linalg.lstsq(root[:, None] * (design - middle), root * (times_us - usual_us), rcond=None)[0].tolist()
        found = (float(usual_us - middle @ (c1, c2)), c1, c2)
        predicted = np.maximum(found[0] + design @ found[1:], 1e-3 * times_us.mean())
        residual = np.abs(times_us / predicted - 1)
        scale = max(1.4826 * float(np.median(residual)), 1e-9)
        trust = np.minimum(1.0, HUBER * scale / np.maximum(residual, 1e-12))
    return found
