"""Events of runs that nobody ran."""

from __future__ import annotations

from unskew.collector.events import IterationCommitted


def committed(iteration: int, wall_us: int, start_us: int = 0) -> IterationCommitted:
    """Rank 0's commit of an iteration that took so long, under the first plan."""
    return IterationCommitted(
        iteration=iteration, plan_version=0, attempt=0, rank=0, loss=1.0, tokens=1,
        start_us=start_us, wall_us=wall_us, log_complete=True,
    )  # fmt: skip
