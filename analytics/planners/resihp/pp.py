"""PP level: how many layers each stage holds (ResiHP, section 6.2).

The paper gives an example, (4, 4, 4) -> (5, 2, 5) for a middle stage 2.5 times slower, and no rule; layers in proportion to
speed is the reading that fits it. Here: minimise the busiest stage, ``max (layers + extra) / speed``, over whole layers, which
`share_out` solves exactly. A stage's speed is that of its slowest living group over the replicas, because ResiHP forces one
partition on all of them. The present partition stays unless the busiest stage gets less busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from unskew.analytics.core.plan import PlanError
from unskew.analytics.core.sharing import share_out
from unskew.analytics.planners.problem import Floats, Ints, PlannerCluster, extra_layers, layer_limits


class PpDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Layers per stage before and after."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def repartition(cluster: PlannerCluster, speeds: Floats, degrees: Ints, before: Sequence[int]) -> PpDecision:
    """One partition for all replicas, by the slowest living group of each stage ([dp, pp] speeds, degrees)."""
    job = cluster.job
    stage_speeds = np.where(speeds > 0, speeds, np.inf).min(axis=0)
    if np.isinf(stage_speeds).any():
        raise PlanError(
            f"stage {int(np.argmax(np.isinf(stage_speeds)))} has no group left in any replica: a checkpoint is needed"
        )
    extra = extra_layers(job, cluster.pp)
    in_flight = cluster.pp - np.arange(cluster.pp)
    smallest = np.where(degrees > 0, degrees, cluster.tp).min(axis=0)
    limits = layer_limits(job, smallest, in_flight)
    parts = [(float(more / speed), float(1.0 / speed)) for more, speed in zip(extra, stage_speeds, strict=True)]
    after = share_out(job.n_layers, parts, limits.tolist())

    def busiest(layers: Sequence[int]) -> float:
        return max(fixed + each * size for (fixed, each), size in zip(parts, layers, strict=True))

    fits = all(size <= limit for size, limit in zip(before, limits.tolist(), strict=True))
    if fits and busiest(before) <= busiest(after) * (1 + 1e-12):
        after = list(before)
    return PpDecision(before=tuple(before), after=tuple(after))
