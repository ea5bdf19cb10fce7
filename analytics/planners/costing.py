"""What pipelines of their own cost: the makespan of 1F1B, for many at once, and a lower bound of it in closed form.

`pipeline_us` is the one evaluator (pipeline/schedule.py) on 1F1B's fixed order: stage s of S starts with min(S - s, M)
forwards, then one backward, one forward. `pipeline_bound_us` is met exactly by four pipelines in five
(docs/internals/planners.md).

Why the bound holds. With c_s = F_s + B_s stage s works M c_s. Before its first action the first micro-batch crosses all earlier
stages, after its last one the last micro-batch crosses them back: together ``sum_{s' < s} c_s'``. Between its first forward and
its first backward a micro-batch passes all later stages, R_s = ``sum_{s' > s} c_s'``, while 1F1B allows the stage at most
n = min(S - 1 - s, M - 1) more forwards: it idles at least R_s - n F_s; and likewise R_s - n B_s after its last forward. Both
add up when the stage has more micro-batches than its warm-up (M > S - s), else they may be the same idle time. With messages
each boundary adds one message per direction.
"""

from __future__ import annotations

import numpy as np

from unskew.analytics.pipeline.schedule import per_hop, pipeline_of
from unskew.analytics.planners.problem import Bools, Floats, Ints, PlannerJob


def pipeline_us(forward_us: Floats, backward_us: Floats, micro_batches: int, message_us: float = 0.0) -> Floats:
    """The makespan of 1F1B: [n] for chunk times [n, stages] of n pipelines with `micro_batches` each."""
    n, stages = forward_us.shape
    if micro_batches == 0 or n == 0:
        return np.zeros(n)
    pipeline = pipeline_of("1f1b", ranks=stages, micro_batches=micro_batches)
    return np.asarray(pipeline.makespan_us(per_hop(pipeline, np.stack([forward_us.T, backward_us.T])), message_us))


def pipeline_bound_us(
    forward_us: Floats, backward_us: Floats, micro_batches: Ints | int, message_us: float = 0.0, used: Bools | None = None
) -> Floats:
    """A lower bound of `pipeline_us` for chunk times [..., stages]; `micro_batches` may be [...] too. See the module's text.

    `used` [..., stages]: stages that are in the pipeline at all (None: all); the others must have chunk times 0.
    """
    both = forward_us + backward_us
    if used is None or used.all():
        before: Ints = np.arange(both.shape[-1])
        behind: Ints = before[::-1]
    else:
        order = np.cumsum(used, axis=-1)
        before, behind = order - used, order[..., -1:] - order
    m = np.asarray(micro_batches, dtype=np.float64)[..., None]
    through = np.cumsum(both, axis=-1)
    later = through[..., -1:] - through
    if message_us:
        through, later = through + 2 * message_us * before, later + 2 * message_us * behind
    others = np.minimum(behind, np.maximum(m - 1, 0))
    first, last = later - others * forward_us, later - others * backward_us
    np.maximum(first, 0.0, out=first)
    np.maximum(last, 0.0, out=last)
    deep = m > behind + 1
    idle = first + last if deep.all() else np.where(deep, first + last, np.maximum(first, last))
    ends = (m - 1) * both
    ends += through
    ends += idle
    bound = (ends if used is None else np.where(used, ends, 0.0)).max(axis=-1)
    return np.where(m[..., 0] > 0, bound, 0.0)


def chunk_times(job: PlannerJob, layers: Ints, speeds: Floats) -> tuple[Floats, Floats]:
    """F and B (us) of stages [..., stages]: 0 where a stage holds nothing, inf where it holds layers and has no speed.

    The embedding counts at the first stage that holds layers, the head at the last, a chunk by itself at all of these.
    """
    used = layers > 0
    work = layers.astype(np.float64)
    if job.own_layers:
        work = work + np.where(used, job.own_layers, 0.0)
    if job.embedding_layers or job.head_layers:
        order = np.cumsum(used, axis=-1)
        work = work + np.where(used & (order == 1), job.embedding_layers, 0.0)
        work = work + np.where(used & (order == order[..., -1:]), job.head_layers, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(used, np.where(speeds > 0, work / speeds, np.inf), 0.0)
    return times * job.forward_us, times * job.backward_us


def replica_us(job: PlannerJob, layers: Ints, speeds: Floats, micro_batches: Ints) -> Floats:
    """[n]: the makespans of n pipelines of their own, [n, stages] and [n]; equal ones are played once."""
    if not len(layers):
        return np.zeros(0)
    first, inverse = distinct(micro_batches[:, None], layers, speeds)
    used = layers[first] > 0
    sizes = used.sum(axis=1)
    forward, backward = chunk_times(job, layers[first], speeds[first])
    times = np.zeros(len(first))
    for count, size in sorted(set(zip(micro_batches[first].tolist(), sizes.tolist(), strict=True))):
        rows = np.flatnonzero((micro_batches[first] == count) & (sizes == size))
        if count and size:
            inside = used[rows]
            shape = (len(rows), size)
            times[rows] = pipeline_us(
                forward[rows][inside].reshape(shape), backward[rows][inside].reshape(shape), count, job.message_us
            )
        elif count:
            times[rows] = np.inf
    return np.asarray(times[inverse])


def distinct(*columns: Floats | Ints) -> tuple[Ints, Ints]:
    """(where each distinct row of these columns [n, any] is first, which of them each row is [n]), in order of appearance."""
    rows = np.concatenate([column.reshape(len(column), -1).astype(np.float64) for column in columns], axis=1)
    text, width = rows.tobytes(), rows.shape[1] * rows.itemsize
    seen: dict[bytes, int] = {}
    first, inverse = list[int](), list[int]()
    for row in range(len(rows)):
        number = seen.setdefault(text[row * width : (row + 1) * width], len(seen))
        if number == len(first):
            first.append(row)
        inverse.append(number)
    return np.array(first, dtype=np.int64), np.array(inverse, dtype=np.int64)
