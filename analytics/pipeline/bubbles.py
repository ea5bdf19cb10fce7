"""Where a timeline's idle time lies, per rank (AdaPtis/OctoPipe's words).

By phase of the iteration:

* warm_up: idle before the first backward begins anywhere;
* cool_down: idle after the last forward has ended everywhere (and after the first backward began);
* steady: the rest.

By place within the rank:

* boundary: before its first chunk and after its last;
* residual: between its chunks.

Both add up to the rank's idle time until the makespan.
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.pipeline.chunks import Chunks
from unskew.analytics.pipeline.dag import Array


class Bubbles(msgspec.Struct, frozen=True):
    """Microseconds per rank with chunks, ranks ascending: arrays [rank, ...further axes]."""

    ranks: tuple[int, ...]
    idle_us: Array
    warm_up_us: Array
    cool_down_us: Array
    steady_us: Array
    boundary_us: Array
    residual_us: Array


def bubbles(chunks: Chunks, start_us: Array, end_us: Array) -> Bubbles:
    """The classed idle time of a timeline: `start_us` and `end_us` [chunk, ...further axes] as `Chunks.run` returns them."""
    finish = end_us.max(axis=0)
    first_backward = start_us[chunks.are("B")].min(axis=0)
    last_forward = np.maximum(end_us[chunks.are("F")].max(axis=0), first_backward)
    zero = np.zeros((1, *finish.shape))
    ranks, rows = [], []
    for rank, positions in chunks.rank_positions():
        begins = np.concatenate([zero, end_us[positions]])
        ends = np.concatenate([start_us[positions], finish[None]])
        gaps = ends - begins
        warm_up = np.maximum(np.minimum(ends, first_backward) - begins, 0.0).sum(axis=0)
        cool_down = np.maximum(ends - np.maximum(begins, last_forward), 0.0).sum(axis=0)
        idle, boundary = gaps.sum(axis=0), gaps[0] + gaps[-1]
        ranks.append(rank)
        rows.append((idle, warm_up, cool_down, idle - warm_up - cool_down, boundary, idle - boundary))
    return Bubbles(tuple(ranks), *(np.stack(column) for column in zip(*rows, strict=True)))
