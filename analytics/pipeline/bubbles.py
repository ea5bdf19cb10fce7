"""Where a timeline's idle time lies, per rank (AdaPtis/OctoPipe's words):

* boundary: before a rank's first chunk and after its last;
* residual: between its chunks.

Both add up to the rank's idle time until the makespan.
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.pipeline.dag import Array, Chunks


class Bubbles(msgspec.Struct, frozen=True):
    """Microseconds per rank with chunks, ranks ascending: arrays [rank, ...further axes]."""

    ranks: tuple[int, ...]
    idle_us: Array
    boundary_us: Array
    residual_us: Array


def bubbles(chunks: Chunks, start_us: Array, end_us: Array) -> Bubbles:
    """The classed idle time of a timeline: `start_us` and `end_us` [chunk, ...further axes] as `Chunks.run` returns them."""
    finish = end_us.max(axis=0)
    zero = np.zeros((1, *finish.shape))
    ranks, rows = [], []
    for rank, positions in chunks.rank_positions():
        gaps = np.concatenate([start_us[positions], finish[None]]) - np.concatenate([zero, end_us[positions]])
        idle, boundary = gaps.sum(axis=0), gaps[0] + gaps[-1]
        ranks.append(rank)
        rows.append((idle, boundary, idle - boundary))
    return Bubbles(tuple(ranks), *(np.stack(column) for column in zip(*rows, strict=True)))
