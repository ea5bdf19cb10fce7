"""What a step trains: of each replica the next of its own stream of batches, a function of the run and of the positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.replicas import Positions
from unskew.runtime.data import Data
from unskew.runtime.model.batch import Batch, drawn
from unskew.runtime.options import RunOptions

Shares = Mapping[int, tuple[int, ...]]
"""Replica -> the numbers of its micro-batches in each batch of the run."""


def batch_of(
    corpus: Data,
    options: RunOptions,
    iteration: int,
    *,
    plan: Plan,
    shares: Shares,
    positions: Positions,
    healthy: Collection[int],
) -> Batch:
    """The micro-batches of all replicas of `plan`, in its order; those of the `healthy` ones count."""
    place = Counter[int]()
    documents, counted = [], []
    drawings = {position: drawn(corpus, options, position) for position in {*positions}}
    for route in plan.routes:
        share = shares[route.replica]
        documents.append(drawings[positions[route.replica]][share[place[route.replica]]])
        place[route.replica] += 1
        if route.replica in healthy:
            counted.append(route.micro_batch)
    return Batch(corpus, options, iteration, documents, counted)
