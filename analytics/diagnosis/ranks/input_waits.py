"""Who waits for input, where collectives alone stand beside it: no replay shows what that costs.

The rule is that of trainings that are watched (loop/watched/side_by_side.py): what a rank waits for input beyond the one that
waits least, as a part of the iteration. A host that waits may have work queued on its device, though; so a rank is named only
when the others wait for it in turn: in their collectives, by half as much or more. Input that nobody is named for is a gap
(coverage.py). So is input beside the steps as they were timed: own times (waiting.py), from which it is taken, then compare
nothing.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.diagnosis.trace.model import Trace
from unskew.analytics.loop.watched.side_by_side import RankWindow, idle
from unskew.collector.events import COLLECTIVE_KINDS, Verdict

INPUT = "data_wait"
LEAST_CONFIRMED = 0.5
OUTSIDE = 1.02
"""Parts of a step that add up to so much of it do not all lie within."""


def input_bound(trace: Trace, iterations: pl.DataFrame, options: DetectorOptions) -> tuple[Verdict, ...]:
    """The ranks that wait for input and are waited for, from the trace of one plan and `iterations` (iteration,
    iteration_us); one verdict at most, without its number."""
    collectives = trace.operations.filter(pl.col("kind").is_in(COLLECTIVE_KINDS))
    ranks = tuple(collectives["rank"].unique().sort().to_list())
    timed = iterations.drop_nulls().filter(pl.col("iteration").is_in(collectives["iteration"].unique().to_list()))
    if INPUT not in trace.kinds or len(ranks) < 2 or not timed.height:
        return ()
    numbers = tuple(timed["iteration"].to_list())
    waited, input_us = (_table(of, numbers, ranks) for of in (collectives, trace.operations.filter(kind=INPUT)))
    measured_us = timed["iteration_us"].cast(pl.Float64).to_numpy()
    found = idle(RankWindow(dict.fromkeys(ranks, 0), numbers, measured_us, {INPUT: input_us}, {}), INPUT, options)
    return tuple(one for one in found if one.victims and _confirmed(one, ranks, waited, input_us))


def outside_steps(trace: Trace, steps: pl.DataFrame) -> str:
    """That ranks wait for input beside their timed steps: collectives and input take longer than these. "" = none does."""
    parts = trace.operations.filter(pl.col("kind").is_in([INPUT, *COLLECTIVE_KINDS]))
    us, input_us = pl.col("wall_us").sum(), pl.col("wall_us").filter(pl.col("kind") == INPUT).sum()
    sums = parts.group_by("iteration", "rank").agg(us=us, input_us=input_us)
    both = steps.select("iteration", "rank", step_us="wall_us").join(sums, on=["iteration", "rank"])
    over = (pl.col("input_us") > 0) & (pl.col("us") > OUTSIDE * pl.col("step_us"))
    ranks = both.group_by("rank").agg(often=over.mean()).filter(pl.col("often") > 0.5)["rank"].sort().to_list()
    if not ranks:
        return ""
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"
    return f"{who} for input outside the timed steps, so own times within these compare nothing"


def _confirmed(verdict: Verdict, ranks: tuple[int, ...], waited: Floats, input_us: Floats) -> bool:
    """Whether those who are not late wait longer in collectives, by a part of what the late wait longer for input."""
    culprits = {party.rank for party in verdict.culprits}
    late = np.array([rank in culprits for rank in ranks])
    for_input, for_others = np.median(input_us, axis=0), np.median(waited, axis=0)
    beyond = float(for_input[late].max() - for_input[~late].min())
    return float(for_others[~late].max() - for_others[late].min()) >= LEAST_CONFIRMED * beyond


def _table(spans: pl.DataFrame, iterations: tuple[int, ...], ranks: tuple[int, ...]) -> Floats:
    """[iteration, rank], us; 0 = none."""
    grid = pl.DataFrame({"iteration": iterations}).join(pl.DataFrame({"rank": ranks}), how="cross")
    sums = spans.group_by("iteration", "rank").agg(us=pl.col("wall_us").sum())
    filled = grid.join(sums, on=["iteration", "rank"], how="left", maintain_order="left")["us"].fill_null(0.0)
    return filled.to_numpy().reshape(len(iterations), len(ranks))
