"""Chunk times -> cost model: ``t = n_layers * (a + b * tokens + c * sum_sq) + head * h * tokens`` per kind of work, device
class and TP degree (`fit`); then the terms of an iteration that no chunk shows (`fit_terms`).

Source: ResiHP (section 4.2, eq. 1: linear in tokens and in the sum of squared document lengths), fitted per layer so that the
model survives a repartition. The steps:

1. the caller gives times at healthy speed (`at_healthy_speed`), so that a device estimated slow does not bend the model;
2. chunks of one kind, device class and TP degree are fitted together and by themselves, robustly (regression.py), those that
   recompute without what their forward takes; terms that
   the data cannot distinguish are named in `Fit.unidentified` (all micro-batches of one size: a is not separable from b, so the
   whole is counted per token), ranks that the others contradict in `Fit.left_out`;
3. what a class has not executed yet (the head) is borrowed from the others, in proportion;
4. prediction intervals by split conformal prediction (Lei et al. 2018): of n absolute log errors on micro-batches that were
   held out, the ``ceil(0.9 (n + 1))``-th covers a further one in nine of ten cases, whatever their distribution.

It cannot see a device that was slow from the start and is the only one of its class, or the only one to execute the head: that
looks like a slow class, or a costly head.

Messages, gradient collectives and the end of an iteration (vote, optimiser) are offsets of one plan's iteration time, so totals
alone cannot separate them: messages and collectives are measured from the moment all sides had come, the end is what then
remains, ``median(measured iteration - predicted without it)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf, log
from statistics import fmean, median

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.core.cost import ChunkCost, CostModel, Place, PlaceCost, Speeds, speed_of
from unskew.analytics.core.iteration import BucketStep, Chunk, GroupWait, Transfer
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.predictor.estimator import data_of, features_of
from unskew.analytics.predictor.regression import Floats, ratios_on, solve
from unskew.analytics.shards.together import LayerSums, norms_in, steps_of_sum, sums_in

TERMS = ("token_us", "head_us_per_token", "token2_us", "layer_us")  # in this order a term gives way to those before it
HELD_OUT = 4  # every fourth
COVERAGE = 0.9  # of the prediction intervals
MOST_MESSAGES = 400  # so many tell what messages cost as well as all
MOST_OWN = 0.5  # of a short chunk: more of it is not taken for what a chunk takes by itself
SHORT = 0.1  # such a part of the chunks is shorter than a short one: a single one may have taken next to nothing


class NotIdentifiable(ValueError):  # noqa: N818  # a state of the data, not a mistake
    """Nothing can be fitted: no chunk with a positive time."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model and what is known of its quality.

    `error_percent`: per kind, mean absolute relative error on held-out micro-batches (the model itself is fitted on all).
    `unidentified`: per kind, the terms that the data could not separate from the others; of several places the key is
    "kind, class at TP degree". `left_out`: per kind, ranks that the others contradict. Chunks without a positive time
    measure nothing and are not counted in `n_chunks`.
    """

    model: CostModel
    error_percent: dict[str, float]
    n_chunks: int
    unidentified: dict[str, tuple[str, ...]]
    left_out: dict[str, tuple[int, ...]]


def at_healthy_speed(chunks: Iterable[Chunk], speeds: Speeds) -> list[Chunk]:
    """The chunks as if their devices were not as slow as `speeds` has them at the time when they ran."""
    return [msgspec.structs.replace(chunk, us=chunk.us * speed_of(speeds, chunk.rank, chunk.kind)) for chunk in chunks]


def expected_us(model: CostModel, chunk: Chunk) -> float:
    """What the chunk takes on a healthy device by the model, which must know its kind."""
    place = model.place_of(chunk.rank, chunk.tp)
    return model.chunk_us(chunk.kind, chunk.work, chunk.n_layers, has_head=chunk.has_head, place=place, again=chunk.again)


def median_error(model: CostModel, chunks: Iterable[Chunk]) -> float:
    """Median absolute relative error of the model on chunks of the kinds that it knows; infinite when there is none."""
    known = [chunk for chunk in chunks if chunk.us > 0 and chunk.kind in model.chunks]
    return median([abs(expected_us(model, chunk) / chunk.us - 1) for chunk in known] or [inf])


def median_ratio(model: CostModel, chunks: Sequence[Chunk]) -> float | None:
    """Median over the ranks of their median measured over predicted; None without a chunk that the model knows."""
    of_rank: dict[int, list[float]] = {}
    for chunk in chunks:
        if chunk.us > 0 and chunk.kind in model.chunks:
            predicted = expected_us(model, chunk)
            if predicted > 0:
                of_rank.setdefault(chunk.rank, []).append(chunk.us / predicted)
    return median(median(ratios) for ratios in of_rank.values()) if of_rank else None


class OwnTime(msgspec.Struct, frozen=True):
    """What chunks of each kind took `rank` by themselves, beside their layers, as one of `tp` members."""

    rank: int
    tp: int
    us: Mapping[str, float]


class _KindFit(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work at one place: what was fitted to `chunks`, and predicted over measured of those that were held out."""

    chunks: Sequence[Chunk]
    cost: ChunkCost
    unidentified: tuple[str, ...]
    left_out: tuple[int, ...]
    ratios: Floats

    @property
    def knows_head(self) -> bool:
        return "head_us_per_token" not in self.unidentified


_Parts = Mapping[Place, Mapping[str, _KindFit]]


def fit(
    chunks: Sequence[Chunk],
    classes: Mapping[str, tuple[int, ...]] | None = None,
    own: Sequence[OwnTime] = (),
) -> Fit:
    """Fit the chunk costs of healthy devices to chunks at their speed (`at_healthy_speed`), each device class at each TP degree
    by itself. `classes`: name -> its ranks. The reference is the place with the most chunks. `own`: what chunks of healthy
    ranks were measured to take beside their layers; where nobody measured it they take nothing.

    Raises `NotIdentifiable` when no chunk has a positive time.
    """
    usable = [chunk for chunk in chunks if chunk.us > 0 and chunk.work.tokens > 0]
    if not usable:
        raise NotIdentifiable(f"no predictor from {len(chunks)} chunks: at least one with tokens and a positive time is needed")
    model = CostModel(chunks={}, classes=dict(classes or {}))
    found: dict[Place, dict[str, list[Chunk]]] = {}
    for chunk in usable:
        found.setdefault(model.place_of(chunk.rank, chunk.tp), {}).setdefault(chunk.kind, []).append(chunk)
    kinds = sorted({chunk.kind for chunk in usable})
    by_size = sorted(found, key=lambda place: (-sum(map(len, found[place].values())), place))
    own_at: dict[Place, list[Mapping[str, float]]] = {}
    for one in own:
        own_at.setdefault(model.place_of(one.rank, one.tp), []).append(one.us)
    parts = {place: _fit_parts(found[place], _median_own_us(own_at.get(place, ()))) for place in by_size}
    of_kind = {kind: [of[kind] for of in parts.values() if kind in of] for kind in kinds}
    ratios = {kind: np.concatenate([part.ratios for part in of]) for kind, of in of_kind.items()}
    prediction_intervals = {kind: prediction_interval(of.tolist()) for kind, of in ratios.items()}
    first, *others = [
        PlaceCost(device_class=name, tp=tp, chunks={kind: _cost_at(kind, (name, tp), parts) for kind in kinds})
        for name, tp in by_size
    ]
    return Fit(
        model=msgspec.structs.replace(
            model,
            chunks=first.chunks,
            prediction_intervals={kind: interval for kind, interval in prediction_intervals.items() if interval is not None},
            device_class=first.device_class,
            tp=first.tp,
            others=tuple(others),
        ),
        error_percent={kind: float(100 * np.mean(np.abs(of - 1))) for kind, of in ratios.items()},
        n_chunks=len(usable),
        unidentified={
            _words(kind, place, alone=len(parts) == 1): part.unidentified
            for kind in kinds
            for place, of in parts.items()
            if (part := of.get(kind)) is not None
        },
        left_out={kind: tuple(sorted({rank for part in of for rank in part.left_out})) for kind, of in of_kind.items()},
    )


def prediction_interval(ratios: Sequence[float]) -> float | None:
    """Half-width of the prediction interval from predicted over measured on data not fitted, as a log; None when they are
    too few."""
    rank = ceil(COVERAGE * (len(ratios) + 1))
    if rank > len(ratios):
        return None
    return sorted(abs(log(max(ratio, 1e-9))) for ratio in ratios)[rank - 1]


class TimedIteration(msgspec.Struct, frozen=True):
    """One committed iteration: its plan, the work of its micro-batches in order, its time (us); how fast its ranks were."""

    plan: Plan
    works: tuple[Work, ...]
    us: float
    speeds: Speeds = {}


def fit_terms(
    fitted: Fit,
    iterations: Sequence[TimedIteration],
    predict_us: Callable[[TimedIteration, CostModel], float],
    transfers: Sequence[Transfer] = (),
    collectives_us: Sequence[float] = (),
    *,
    group_waits: Sequence[GroupWait] = (),
    bucket_steps: Sequence[BucketStep] = (),
) -> Fit:
    """The fit with what messages cost and `iteration_end_us` set so that predicted iterations match the measured ones.

    `predict_us` is the evaluator at the estimated speeds; `transfers` are single messages (none: messages are free and the end
    carries them), `collectives_us` are times of gradient collectives from the moment all members had come, `group_waits` tell
    what groups' exchanges within chunks take, `bucket_steps` are of the sums of gradients, which have a price of their own
    where the model knows their sizes (`sync`).
    `error_percent` gains "iteration": mean absolute relative error of the odd iterations when the end is learned from the
    even ones (its prediction interval likewise). Raises `NotIdentifiable` without an iteration.
    """
    if not iterations:
        raise NotIdentifiable("no iteration to learn the iteration's end from: at least one committed iteration is needed")
    message_us, message_token_us = message_costs(transfers)
    of = fitted.model.sums_of(iterations[0].plan.n_layers)
    sum_us, sum_token_us = line_of([step for wait in group_waits if (step := group_step(wait, of)) is not None])
    sync = fitted.model.sync
    if sync is not None:
        of_size: dict[float, list[float]] = {}
        for one in bucket_steps:
            of_size.setdefault(one.n_bytes, []).append(one.us)
        # Nearly all buckets may be of one size: each size counts once.
        step_us, byte_us = line_of([(median(us), n_bytes) for n_bytes, us in of_size.items()])
        sync = msgspec.structs.replace(sync, step_us=step_us, byte_us=byte_us)
    # An end shorter than a collective is none at all where ranks of one pipeline share cores: it is taken off what is left.
    collective_us = max(0.0, median(collectives_us)) if collectives_us else 0.0
    bare = msgspec.structs.replace(
        fitted.model,
        sync=sync,
        message_us=message_us,
        message_token_us=message_token_us,
        sum_us=sum_us,
        sum_token_us=sum_token_us,
        collective_us=collective_us,
        iteration_end_us=collective_us,
        end_more_us=(),
    )
    makespans = [predict_us(seen, bare) - collective_us for seen in iterations]
    remains = [seen.us - makespan for seen, makespan in zip(iterations, makespans, strict=True)]
    half_end = max(0.0, median(remains[::2]))
    tested = list(zip(iterations, makespans, strict=True))[1::2] or [(iterations[0], makespans[0])]
    ratios = [(makespan + half_end) / seen.us for seen, makespan in tested]
    interval = prediction_interval(ratios)
    return msgspec.structs.replace(
        fitted,
        model=msgspec.structs.replace(
            bare,
            iteration_end_us=max(0.0, median(remains)),
            prediction_intervals=fitted.model.prediction_intervals
            if interval is None
            else {**fitted.model.prediction_intervals, "iteration": interval},
        ),
        error_percent={**fitted.error_percent, "iteration": 100 * fmean(abs(ratio - 1) for ratio in ratios)},
    )


def group_step(wait: GroupWait, of: LayerSums) -> tuple[float, float] | None:
    """(us, tokens) of a step of the sums of one chunk, in the mean; None where it sums nothing."""
    chunk = wait.kind, wait.first_layer, wait.n_layers, of
    sums = sums_in(*chunk, again=wait.again, sequence_parallel=wait.sequence_parallel)
    if not sums:
        return None
    carried = sums * wait.tokens
    if wait.sequence_parallel and (norms := norms_in(*chunk)):
        sums, carried = sums + 1, carried + norms
    return wait.us / (sums * steps_of_sum(wait.members)), carried / sums / wait.members


def message_costs(transfers: Sequence[Transfer]) -> tuple[float, float]:
    """(us, us per token) of a message. Messages whose time is whole count, where there are any."""
    return line_of([(one.us, one.tokens) for one in ([one for one in transfers if one.whole] or transfers)])


def line_of(seen: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(us, us per token) from (us, tokens): the median, and a rate (Theil-Sen: the median of all slopes) where that leaves less
    than half of what messages of different sizes differ by."""
    if not seen:
        return 0.0, 0.0
    us, tokens = np.array(seen[:: 1 + len(seen) // MOST_MESSAGES], dtype=np.float64).T
    first, second = np.triu_indices(len(us), 1)
    apart = tokens[first] != tokens[second]
    if apart.any():
        slopes = (us[second] - us[first])[apart] / (tokens[second] - tokens[first])[apart]
        rate = max(float(np.median(slopes)), 0.0)
        rest = us - rate * tokens
        if 2 * np.median(abs(rest - np.median(rest))) < np.median(abs(us - np.median(us))):
            return max(float(np.median(rest)), 0.0), rate
    return max(float(np.median(us)), 0.0), 0.0


def _words(kind: str, place: Place, *, alone: bool) -> str:
    name, tp = place
    return kind if alone else " ".join([f"{kind},", *([name] if name else []), f"at TP {tp}"])


def _fit_parts(found: Mapping[str, Sequence[Chunk]], own_us: Mapping[str, float]) -> dict[str, _KindFit]:
    """The kinds of one place. Of chunks with the forward once more only what they take beside it tells of their own kind."""
    forward = _fit_part(found["F"], own_us.get("F", 0.0)) if "F" in found else None
    parts = {"F": forward} if forward is not None else {}
    for kind, chunks in found.items():
        own = [_without_forward(chunk, forward) for chunk in chunks]
        if kind != "F":
            parts[kind] = _fit_part([chunk for chunk in own if chunk.us > 0] or chunks, own_us.get(kind, 0.0))
    return parts


def _median_own_us(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Kind of work -> what a chunk takes by itself, of what ranks measured."""
    kinds = {kind for own_us in of_ranks for kind in own_us}
    return {kind: max(median(own_us[kind] for own_us in of_ranks if kind in own_us), 0.0) for kind in kinds}


def _without_forward(chunk: Chunk, forward: _KindFit | None) -> Chunk:
    if not chunk.again:
        return chunk
    forward_us = forward.cost.us(chunk.work, chunk.n_layers, chunk.has_head) if forward is not None else inf
    return msgspec.structs.replace(chunk, us=chunk.us - forward_us, again=False)


def _fit_part(chunks: Sequence[Chunk], own_us: float) -> _KindFit:
    own_us = min(own_us, MOST_OWN * float(np.quantile([chunk.us for chunk in chunks], SHORT)))
    chunks = [chunk for chunk in chunks if own_us <= MOST_OWN * chunk.us]
    features, us = features_of(chunks)
    data = data_of(features, us - own_us)
    solution = solve(data)
    return _KindFit(
        chunks=chunks,
        cost=ChunkCost(**dict(zip(TERMS, solution.coefficients.tolist(), strict=True)), own_us=own_us),
        unidentified=tuple(name for i, name in enumerate(TERMS) if i not in solution.terms),
        left_out=solution.left_out,
        ratios=ratios_on(_held_out(chunks), data, solution, own_us),
    )


def _held_out(chunks: Sequence[Chunk]) -> NDArray[np.bool_]:
    """Every fourth micro-batch, or every fourth chunk of fewer than four micro-batches."""
    works = sorted({(c.work.tokens, c.work.sum_sq) for c in chunks})
    turn = np.arange(len(chunks))
    if len(works) >= HELD_OUT:
        number = {work: i for i, work in enumerate(works)}
        turn = np.array([number[c.work.tokens, c.work.sum_sq] for c in chunks])
    return np.asarray(turn % HELD_OUT == HELD_OUT - 1)


def _cost_at(kind: str, place: Place, parts: _Parts) -> ChunkCost:
    """What was fitted there. What was never executed there (the head, a kind of work) is as elsewhere, in the proportion in
    which the two places need time for the layers that both have executed; a head that came with every chunk, so that it cannot
    be separated from the layers, has the share that it has elsewhere."""
    elsewhere = [donor for donor in parts if donor != place and kind in parts[donor]]
    heads = [donor for donor in elsewhere if parts[donor][kind].knows_head]
    if kind not in parts[place]:
        donor = (*heads, *elsewhere)[0]
        return parts[donor][kind].cost.times(_proportion(parts[place], parts[donor]))
    part = parts[place][kind]
    if part.knows_head or not heads:
        return part.cost
    known = parts[heads[0]][kind].cost
    if not any(chunk.has_head for chunk in part.chunks):
        head_us = known.head_us_per_token * _proportion(parts[place], parts[heads[0]])
        return msgspec.structs.replace(part.cost, head_us_per_token=head_us)
    share = known.head_us_per_token / known.token_us if known.token_us > 0 else 0.0
    token_us = part.cost.token_us / (1 + share / part.chunks[0].n_layers)
    return msgspec.structs.replace(part.cost, token_us=token_us, head_us_per_token=share * token_us)


def _proportion(here: Mapping[str, _KindFit], there: Mapping[str, _KindFit]) -> float:
    """How many times as long the layers of the chunks executed here take as they would there."""
    shared = [(part, there[kind].cost) for kind, part in here.items() if kind in there]
    ours = sum(part.cost.us(chunk.work, chunk.n_layers, False) for part, _ in shared for chunk in part.chunks)
    theirs = sum(cost.us(chunk.work, chunk.n_layers, False) for part, cost in shared for chunk in part.chunks)
    return ours / theirs if theirs > 0 else 1.0
