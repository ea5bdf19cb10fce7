"""PP level: how many layers each stage holds (ResiHP, section 6.2).

The paper gives an example, (4, 4, 4) -> (5, 2, 5) for a middle stage 2.5 times slower, and no rule; layers in proportion to
speed is the reading that fits it. Here: minimise the busiest stage, ``max (layers + extra) / speed``, over whole layers, which
`share_out` solves exactly. ResiHP forces one partition on all replicas, so a stage has one speed. Which, when its groups
differ, the paper leaves open; both readings are tried, and the partition as it is:

* its slowest living group's: right when every group keeps its own micro-batches;
* what its groups reach together, dead ones nothing: right when the DP level then evens out the stage.

With one replica both are the example.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from unskew.analytics.core.sharing import share_out
from unskew.analytics.planners.problem import Floats, Ints, PlannerCluster, extra_layers, layer_limits


class PpDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Layers per stage before and after."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def partitions(cluster: PlannerCluster, speeds: Floats, degrees: Ints, before: Sequence[int]) -> list[tuple[int, ...]]:
    """Partitions worth trying for all replicas ([dp, pp] speeds, degrees): the present one first, where memory allows it."""
    job = cluster.job
    extra = extra_layers(job, cluster.pp)
    in_flight = cluster.pp - np.arange(cluster.pp)
    smallest = np.where(degrees > 0, degrees, cluster.tp).min(axis=0)
    limits = layer_limits(job, smallest, in_flight).tolist()
    found = [tuple(before)] if all(size <= limit for size, limit in zip(before, limits, strict=True)) else []
    for stage_speeds in (np.where(speeds > 0, speeds, np.inf).min(axis=0), speeds.mean(axis=0)):
        parts = [(float(more / speed), float(1.0 / speed)) for more, speed in zip(extra, stage_speeds, strict=True)]
        after = tuple(share_out(job.n_layers, parts, limits))
        if after not in found:
            found.append(after)
    return found
