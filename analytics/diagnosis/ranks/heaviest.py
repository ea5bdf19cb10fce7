"""Whether long micro-batches lie on any replica, or on always the same one: then it may be slow now and then, or its data long.

Where lengths are inferred, a replica of which all stages are slow in some iterations looks as if it had long documents in them.
Lengths are drawn anew in each iteration, so each of R replicas has most to do in one iteration of R. Iterations count by what
unequal work cost in them, which makes them as many as ``n = (sum c)^2 / sum c^2`` alike (Kish). The chance that one of the
replicas has at least the share that the first one has is at most R times a binomial's upper tail. So it is for who has least.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.special import betainc

from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.pipeline.dag import Array

BY_CHANCE = 1e-3


class Heaviest(msgspec.Struct, frozen=True):
    """The replica and its ranks that had most to do in the costliest iterations: in `share` of the cost, of `n` iterations
    alike; `chance` that the first of healthy replicas has so much, `least_chance` that it has all."""

    replica: int
    ranks: tuple[int, ...]
    share: float
    n: float
    chance: float
    least_chance: float

    @property
    def is_outlier(self) -> bool:
        """Whether chance does not explain that it is that one."""
        return self.chance < BY_CHANCE

    @property
    def shows(self) -> bool:
        """Whether there are enough iterations for one replica to stand out."""
        return self.least_chance < BY_CHANCE


def heaviest(sections: Sequence[tuple[TraceSection, Array]]) -> Heaviest | None:
    """By sections and what unequal work cost in their iterations; None with one replica."""
    replicas = sorted({replica for section, _ in sections for replica in section.replicas})
    if len(replicas) < 2:
        return None
    cost = np.maximum(np.concatenate([of for _, of in sections]), 0.0)
    most = np.concatenate([_most_to_do(section) for section, _ in sections])
    of_replica = np.array([cost[most == replica].sum() for replica in replicas])
    total, first = float(cost.sum()), int(of_replica.argmax())
    share, n = float(of_replica[first]) / total, total**2 / float((cost**2).sum())
    chance, least = (len(replicas) * float(betainc(of * n, n - of * n + 1, 1 / len(replicas))) for of in (share, 1.0))
    ranks = {o.rank for section, _ in sections for o in section.recording.graph.operations if o.replica == replicas[first]}
    return Heaviest(replicas[first], tuple(sorted(ranks)), share, n, min(chance, 1.0), min(least, 1.0))


def is_one_light(sections: Sequence[TraceSection]) -> bool:
    """Whether one replica has the least to do in more iterations than chance explains: it has less, or the others are slow."""
    replicas = sorted({replica for section in sections for replica in section.replicas})
    if len(replicas) < 2:
        return False
    least = np.concatenate([np.array(section.replicas)[_to_do(section).argmin(axis=0)] for section in sections])
    k, n = max(int((least == one).sum()) for one in replicas), len(least)
    return len(replicas) * float(betainc(k, n - k + 1, 1 / len(replicas))) < BY_CHANCE


def _most_to_do(section: TraceSection) -> Array:
    """[iteration]: the replica whose chunks should take longest."""
    return np.asarray(np.array(section.replicas)[_to_do(section).argmax(axis=0)])


def _to_do(section: TraceSection) -> Array:
    """[replica, iteration]: what its chunks should take together."""
    place = np.array([operation.replica for operation in section.recording.graph.operations])
    return np.stack([np.nansum(section.expected_us[place == one], axis=0) for one in section.replicas])
