"""What an assignment costs: the time of an iteration under 1F1B, for thousands of pipelines at once.

`pipeline_us` plays 1F1B's fixed order (stage s of S starts with min(S - s, M) forwards, then one backward, one forward) as the
same DAG that analytics/pipeline.py evaluates, level by level instead of action by action, with one array axis over pipelines.
`pipeline_bound_us` is a lower bound of it in closed form; nine in ten pipelines meet it exactly (docs/planners.md).

Why the bound holds. With c_s = F_s + B_s stage s works M c_s. Before its first action the first micro-batch crosses all earlier
stages, after its last one the last micro-batch crosses them back: together ``sum_{s' < s} c_s'``. Between its first forward and
its first backward a micro-batch passes all later stages, R_s = ``sum_{s' > s} c_s'``, while 1F1B allows the stage at most
n = min(S - 1 - s, M - 1) more forwards: it idles at least R_s - n F_s; and likewise R_s - n B_s after its last forward. Both
add up when the stage has more micro-batches than its warm-up (M > S - s), else they may be the same idle time. With messages
each boundary adds one message per direction.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from unskew.analytics.planners.cluster import Bools, Floats, Ints, Job


class _Level(msgspec.Struct, frozen=True, eq=False):
    """Actions that only need earlier levels: their rows, what each waits for, which message, which duration."""

    rows: Ints
    before: Ints
    given: Ints
    message: Ints
    duration: Ints


@lru_cache(maxsize=256)
def _levels(stages: int, micro_batches: int) -> tuple[_Level, ...]:
    """1F1B's DAG cut into levels; row 0 is "nothing" (ends at 0). `duration` counts F_0..F_S-1, B_0..B_S-1."""
    orders = [_order(stages, micro_batches, stage) for stage in range(stages)]
    number: dict[tuple[bool, int, int], int] = {}
    depth = [0]
    entries: dict[int, list[tuple[int, int, int, int, int]]] = {}
    done, last = [0] * stages, [0] * stages
    while len(number) < 2 * stages * micro_batches:
        for stage in range(stages):
            while done[stage] < len(orders[stage]):
                backward, micro_batch = orders[stage][done[stage]]
                source = _source(backward, micro_batch, stage, stages)
                if source is not None and source not in number:
                    break
                given = 0 if source is None else number[source]
                level = 1 + max(depth[last[stage]], depth[given])
                row = len(depth)
                depth.append(level)
                crosses = source is not None and source[2] != stage
                entries.setdefault(level, []).append((row, last[stage], given, int(crosses), stage + stages * backward))
                number[backward, micro_batch, stage] = last[stage] = row
                done[stage] += 1
    return tuple(
        _Level(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))) for _, rows in sorted(entries.items())
    )


def _order(stages: int, micro_batches: int, stage: int) -> list[tuple[bool, int]]:
    """The actions of a stage as (is it a backward, micro-batch)."""
    forwards = min(stages - stage, micro_batches)
    order = [(False, number) for number in range(forwards)]
    for number in range(micro_batches):
        order.append((True, number))
        if forwards < micro_batches:
            order.append((False, forwards))
            forwards += 1
    return order


def _source(backward: bool, micro_batch: int, stage: int, stages: int) -> tuple[bool, int, int] | None:
    if not backward:
        return (False, micro_batch, stage - 1) if stage > 0 else None
    return (True, micro_batch, stage + 1) if stage + 1 < stages else (False, micro_batch, stage)


def pipeline_us(forward_us: Floats, backward_us: Floats, micro_batches: int, message_us: float = 0.0) -> Floats:
    """The makespan of 1F1B: [n] for chunk times [n, stages] of n pipelines with `micro_batches` each."""
    n, stages = forward_us.shape
    if micro_batches == 0 or n == 0:
        return np.zeros(n)
    durations = np.concatenate([forward_us.T, backward_us.T])
    end = np.zeros((1 + 2 * stages * micro_batches, n))
    for level in _levels(stages, micro_batches):
        begin = end[level.given]
        if message_us:
            begin = begin + message_us * level.message[:, None]
        end[level.rows] = np.maximum(begin, end[level.before]) + durations[level.duration]
    return np.asarray(end.max(axis=0))


def pipeline_bound_us(
    forward_us: Floats, backward_us: Floats, micro_batches: Ints | int, message_us: float = 0.0, used: Bools | None = None
) -> Floats:
    """A lower bound of `pipeline_us` for chunk times [..., stages]; `micro_batches` may be [...] too. See the module's text.

    `used` [..., stages]: stages that are in the pipeline at all (None: all); the others must have chunk times 0.
    """
    both = forward_us + backward_us
    inside = np.ones(both.shape, dtype=np.bool_) if used is None else used
    order = np.cumsum(inside, axis=-1)
    before, behind = order - inside, order[..., -1:] - order
    m = np.asarray(micro_batches, dtype=np.float64)[..., None]
    through = np.cumsum(both, axis=-1)
    earlier = through - both + 2 * message_us * before
    later = through[..., -1:] - through + 2 * message_us * behind
    others = np.minimum(behind, np.maximum(m - 1, 0))
    first, last = np.maximum(0.0, later - others * forward_us), np.maximum(0.0, later - others * backward_us)
    idle = np.where(m > behind + 1, first + last, np.maximum(first, last))
    bound = np.where(inside, earlier + m * both + idle, 0.0).max(axis=-1)
    return np.where(m[..., 0] > 0, bound, 0.0)


def chunk_times(job: Job, layers: Ints, speeds: Floats) -> tuple[Floats, Floats]:
    """F and B (us) of stages [..., stages]: 0 where a stage holds nothing, inf where it holds layers and has no speed.

    The embedding counts at the first stage that holds layers, the head at the last.
    """
    used = layers > 0
    work = layers.astype(np.float64)
    if job.embedding_layers or job.head_layers:
        order = np.cumsum(used, axis=-1)
        work = work + np.where(used & (order == 1), job.embedding_layers, 0.0)
        work = work + np.where(used & (order == order[..., -1:]), job.head_layers, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(used, np.where(speeds > 0, work / speeds, np.inf), 0.0)
    return times * job.forward_us, times * job.backward_us


def replica_us(job: Job, layers: Ints, speeds: Floats, micro_batches: Ints) -> Floats:
    """[n]: the makespans of n pipelines of their own, [n, stages] and [n]; equal ones are played once."""
    result = np.zeros(len(layers))
    if not len(layers):
        return result
    keys = np.column_stack([micro_batches.astype(np.float64), layers.astype(np.float64), speeds])
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    used = layers[first] > 0
    sizes = used.sum(axis=1)
    forward, backward = chunk_times(job, layers[first], speeds[first])
    times = np.zeros(len(first))
    for count, size in np.unique(np.column_stack([micro_batches[first], sizes]), axis=0).tolist():
        rows = np.flatnonzero((micro_batches[first] == count) & (sizes == size))
        if count and size:
            inside = used[rows]
            shape = (len(rows), size)
            times[rows] = pipeline_us(
                forward[rows][inside].reshape(shape), backward[rows][inside].reshape(shape), count, job.message_us
            )
        elif count:
            times[rows] = np.inf
    result[:] = times[inverse.ravel()]
    return result
