"""Whether the ranks' clocks agree in a recording: a collective ends on nobody before all have begun it.

Where one does, beyond `TOLERANCE` of what is recorded of an iteration, in more than a few collectives, either the clocks are
apart, by an offset or by a drift, or the ranks do not take part in one collective. It is the clocks if the collectives are in
order once those are set (by where each rank's ends lie beside the others', early and late in the recording, as all end
together) and the ranks' iterations begin nearer to each other: stages of a pipeline, whose groups nobody named, end as much
earlier as they begin later. What follows then from comparing times of two ranks (who waited for whom, who began late, whether
passes end together) says nothing.
"""

from __future__ import annotations

import polars as pl

from unskew.analytics.diagnosis.trace.model import Trace
from unskew.collector.events import COLLECTIVE_KINDS

TOLERANCE, LEAST_US = 0.05, 100.0
MOST_OUT_OF_ORDER = 0.1


def why_clocks_disagree(trace: Trace) -> str:
    """Which ranks' clocks are apart, and by how much; "" where they agree or nothing shows it."""
    begin, end = pl.col("start_us"), pl.col("start_us") + pl.col("wall_us")
    name = ("iteration", "kind", "group", "stage")
    rows = (
        trace.operations.filter(pl.col("kind").is_in(COLLECTIVE_KINDS))
        .select(*name, "rank", begin_us=begin, end_us=end, turn=begin.rank("ordinal").over(*name, "rank"))
        .filter(pl.len().over(*name, "turn") > 1)
    )
    if not rows.height:
        return ""
    lasted = trace.operations.group_by("iteration", "rank").agg((end.max() - begin.min()).alias("us"))["us"]
    tolerance = max(LEAST_US, TOLERANCE * float(lasted.median() or 0.0))  # type: ignore[arg-type]
    if _out_of_order(rows, tolerance) <= MOST_OUT_OF_ORDER:
        return ""
    offset = rows.with_columns(off_us=pl.col("end_us") - pl.col("end_us").median().over(*name, "turn"))
    middle = rows["iteration"].median()
    early, late = pl.col("iteration") <= middle, pl.col("iteration") >= middle
    set_by = offset.group_by("rank").agg(
        begin_off=pl.col("off_us").filter(early).median(),
        end_off=pl.col("off_us").filter(late).median(),
        begin_at=pl.col("iteration").filter(early).mean(),
        end_at=pl.col("iteration").filter(late).mean(),
    )
    slope = (pl.col("end_off") - pl.col("begin_off")) / (pl.col("end_at") - pl.col("begin_at"))
    off_us = pl.col("begin_off") + slope.fill_nan(0.0) * (pl.col("iteration") - pl.col("begin_at"))
    both = rows.join(set_by, on="rank").with_columns(off_us=off_us)
    in_order = both.with_columns(pl.col("begin_us") - pl.col("off_us"), pl.col("end_us") - pl.col("off_us"))
    begins = trace.operations.group_by("iteration", "rank").agg(begin_us=begin.min()).join(set_by, on="rank")
    spread = begins.group_by("iteration").agg(
        _spread(pl.col("begin_us")).alias("as_read"), _spread(pl.col("begin_us") - off_us).alias("once_set")
    )
    nearer = spread.select((pl.col("once_set") < pl.col("as_read")).mean()).item() > 0.5
    if not nearer or _out_of_order(in_order, tolerance) > MOST_OUT_OF_ORDER:
        return ""
    ranks = both.group_by("rank").agg(pl.col("off_us").median()).sort("off_us", "rank")["rank"]
    one, other = sorted((ranks[0], ranks[-1]))
    of_one, of_other = (pl.col("off_us").filter(pl.col("rank") == rank).mean() for rank in (one, other))
    apart = both.group_by("iteration").agg(ms=(of_one - of_other).abs() / 1e3)["ms"].drop_nulls().to_list()
    by = f"{max(apart):.3g} ms" if 1e3 * (max(apart) - min(apart)) <= tolerance else f"up to {max(apart):.3g} ms, drifting,"
    return (
        f"the clocks of ranks {one} and {other} are {by} apart: collectives end on one before the other begins them, so "
        "nothing that compares times of two ranks counts"
    )


def _spread(us: pl.Expr) -> pl.Expr:
    return us.max() - us.min()


def _out_of_order(rows: pl.DataFrame, tolerance_us: float) -> float:
    """The part of the collectives that end on a rank before another has begun them."""
    each = rows.group_by("iteration", "kind", "group", "stage", "turn").agg(
        over_us=pl.col("begin_us").max() - pl.col("end_us").min()
    )
    return float((each["over_us"] > tolerance_us).mean() or 0.0)  # type: ignore[arg-type]
