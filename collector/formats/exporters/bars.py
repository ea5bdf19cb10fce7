"""A run's spans as bars of a timeline: none shorter than a message that ends in it, none across another of its thread.

Times are the run's clock. Where iterations of an imported trace each begin at zero, they are laid one after another. A send
lasts until its iteration ends on its sender; its bar ends when the receiver has the message.
"""

from __future__ import annotations

from itertools import accumulate

import polars

from unskew.collector.read.reader import Reader

THREADS = {
    "F": "compute", "B": "compute", "W": "compute", "recv": "receiving", "send": "sending", "all_reduce": "collectives",
    "reduce_scatter": "collectives", "all_gather": "collectives",
}  # fmt: skip
_ORDER = ("compute", "receiving", "sending", "collectives", "other")
_SPANS = """
    select rank, kind, iteration, plan_version as epoch, attempt, micro_batch, start_us, wall_us, peer, bytes, "group",
        first_layer, n_layers, compute_us, wait_tp_us, device
    from spans
    left join (select run, iteration, plan_version as version, attempt as last from iterations) using (run, iteration)
    where run = ? and (not ? or last is null or (version = plan_version and last = attempt))
    order by start_us, rank, seq
"""


def bars(reader: Reader, run: str, *, counted: bool = False) -> polars.DataFrame:
    """A row per span (`counted`: of the attempts that counted): `start_us`, `end_us` and `lane` to draw it by, and of a receive
    `sent_row`, the `row` of its send."""
    spans = _in_a_row(reader.sql(_SPANS, [run, counted]))
    spans = spans.with_columns(end_us=polars.col("start_us") + polars.col("wall_us"))
    drawn = _with_messages(spans.with_row_index("row"))
    return drawn.with_columns(lane=polars.Series(_lanes(drawn), dtype=polars.String))


def lane_order(lanes: set[str]) -> list[str]:
    """The names of lanes from top to bottom."""
    return sorted(lanes, key=lambda lane: (_ORDER.index(lane.partition(" ")[0]), len(lane), lane))


def _in_a_row(spans: polars.DataFrame) -> polars.DataFrame:
    """The spans; laid one iteration after the other where each begins anew."""
    if spans.is_empty():
        return spans
    iterations = (
        spans.group_by("iteration")
        .agg(begin=polars.col("start_us").min(), end=(polars.col("start_us") + polars.col("wall_us")).max())
        .sort("iteration")
    )
    begins = iterations["begin"].to_list()
    if begins == sorted(set(begins)):
        return spans
    shift = [0, *accumulate(iterations["end"].to_list())][:-1]
    laid = iterations.select("iteration", shift=polars.Series(shift))
    return spans.join(laid, on="iteration").with_columns(start_us=polars.col("start_us") + polars.col("shift")).drop("shift")


def _with_messages(spans: polars.DataFrame) -> polars.DataFrame:
    """Each receive with the send of the same micro-batch on the other side, the n-th with the n-th: the send's bar ends with
    the message, and the receive's lasts beyond its beginning, also where a message takes no time."""
    of = ["iteration", "epoch", "attempt", "micro_batch", "sender", "receiver"]
    sides = []
    for kind, sender, receiver in (("send", "rank", "peer"), ("recv", "peer", "rank")):
        side = spans.filter(
            (polars.col("kind") == kind) & polars.col("peer").is_not_null() & polars.col("micro_batch").is_not_null()
        )
        side = side.select("row", "start_us", "end_us", *of[:4], sender=polars.col(sender), receiver=polars.col(receiver))
        sides.append(side.with_columns(nth=polars.int_range(polars.len()).over(of, order_by="start_us")))
    pairs = sides[0].join(sides[1], on=[*of, "nth"], suffix="_there")
    sends = pairs.select("row", received_us="end_us_there")
    receives = pairs.select(row="row_there", sent_row="row", sent_us="start_us")
    start, end = polars.col("start_us"), polars.col("end_us")
    return (
        spans.join(sends, on="row", how="left", maintain_order="left")
        .join(receives, on="row", how="left", maintain_order="left")
        .with_columns(
            end_us=polars.when(polars.col("received_us").is_not_null())
            .then(polars.max_horizontal(polars.min_horizontal(end, "received_us"), start + 1))
            .when(polars.col("sent_us").is_not_null())
            .then(polars.max_horizontal(end, start + 1, polars.col("sent_us") + 1))
            .otherwise(end)
        )
        .drop("sent_us", "received_us")
    )


def _lanes(spans: polars.DataFrame) -> list[str]:
    """The thread of each bar, or a further lane of it where a bar that is not over takes the first."""
    free: dict[tuple[int, str], list[int]] = {}
    rows = list(spans.select("start_us", "end_us", "rank", "kind").iter_rows())
    lanes = [""] * len(rows)
    for place in sorted(range(len(rows)), key=lambda place: int(rows[place][0])):
        start_us, end_us, rank, kind = rows[place]
        thread = THREADS.get(kind, "other")
        ends = free.setdefault((rank, thread), [])
        lane = next((number for number, until in enumerate(ends) if until <= start_us), len(ends))
        ends[lane : lane + 1] = [end_us]
        lanes[place] = thread if lane == 0 else f"{thread} {lane + 1}"
    return lanes
