"""A trace: what a run's operations did and when, the one form in which every analysis reads them, and what fills it.

Live runs write spans, importers write spans or exact operations: a `Trace` is made of either, and no analysis asks which.

A rank's place is given by the plan, or by the operations themselves. Of spans without a plan it is found out: ranks that
send each other messages are one replica; its stages follow each other as their first layers do, or, where no layers are
recorded, as their first forward passes begin. A stage then counts as one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

import msgspec
import polars as pl

from unskew.analytics.core.plan import Plan
from unskew.collector.events import CHUNK_KINDS

PAUSES = {"gc": "gc_pause", "data_wait": "input_bound"}
"""Kinds of operations in which a rank could have worked -> the cause that they are evidence of."""

_NUMBERS = (
    "plan_version", "iteration", "rank", "replica", "stage", "micro_batch", "first_layer", "n_layers", "model_chunk", "peer",
    "turn",
)  # fmt: skip
COLUMNS: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(_NUMBERS, pl.Int64), "kind": pl.String, "group": pl.String, "start_us": pl.Float64, "wall_us": pl.Float64,
    "own_us": pl.Float64, "within_us": pl.Float64, "runq_us": pl.Float64,
}  # fmt: skip

OPERATIONS = {
    "forward-compute": "F", "backward-compute": "B", "forward-send": "send", "forward-recv": "recv", "backward-send": "send",
    "backward-recv": "recv", "params-all-gather": "all_gather", "grads-reduce-scatter": "reduce_scatter",
    "embedding-grads-all-reduce": "all_reduce", "layernorm-grads-all-reduce": "all_reduce",
    "separate-grads-all-reduce": "all_reduce",
    "optimizer-clip-main-grad": "optimizer", "optimizer": "optimizer", "gc": "gc",
}  # fmt: skip
"""NDTimeline's operations -> the kinds of a trace."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of a run, a row of `COLUMNS` each, null where something is not known or has no meaning.

    `kind` is a span's. A chunk (kind F, B or W) has a `micro_batch`, unique in its iteration, and its layers; for `within_us`
    of it its rank waited for others in its middle, for their shards or for its tensor-parallel group; `own_us` of it is what
    its device worked, without a wait for a core, where the source tells, else all of it; for `runq_us` its rank had no core,
    which an emulated device does not wait for. `group` is what the source calls the
    operation or the group of a collective, `turn` its number in it. `replica` and `stage` are null of a rank that executes
    nothing. `iterations`: plan_version, iteration, begin_us, end_us of those that were recorded whole.

    `streams`: messages and collectives run beside the chunks, on streams of their own that `group` names as NDTimeline does;
    else a rank does one thing after the other. `votes`: an iteration ends with a vote of all ranks, as ours do.
    """

    operations: pl.DataFrame
    iterations: pl.DataFrame
    streams: bool = False
    votes: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """What was recorded: pauses that never take any time only fill a place that their format asks for."""
        filler = pl.col("kind").is_in(list(PAUSES)) & (pl.col("wall_us").max().over("kind") <= 0)
        return frozenset(self.operations.filter(~filler)["kind"].unique().to_list())

    @property
    def has_chunks(self) -> bool:
        """Whether chunks are known by micro-batch, which replay needs."""
        return bool((self.operations["kind"].is_in(CHUNK_KINDS) & self.operations["micro_batch"].is_not_null()).any())

    @property
    def plan_versions(self) -> tuple[int, ...]:
        return tuple(self.operations["plan_version"].unique().sort().to_list())

    def of_plan(self, plan_version: int) -> Trace:
        """What ran under one plan."""
        mine = pl.col("plan_version") == plan_version
        return msgspec.structs.replace(self, operations=self.operations.filter(mine), iterations=self.iterations.filter(mine))

    def only(self, kinds: Iterable[str]) -> Trace:
        """What is left when nothing but these kinds was recorded."""
        return msgspec.structs.replace(self, operations=self.operations.filter(pl.col("kind").is_in(list(kinds))))


def from_operations(rows: pl.DataFrame) -> Trace:
    """The trace of operations in NDTimeline's form (ByteDance, OSDI'25).

    One row is one operation of one worker in one step: `dp_rank`, `stage`, `rank`, `step`, `optype`, `start_ts` and `duration`
    in seconds, `seq_id` (order among the operations of one type), `mc` (model chunk of the stage), `mb_id` (-1 = none).
    """
    kind = pl.col("optype").cast(pl.String)
    operations = rows.select(
        pl.lit(0).alias("plan_version"),
        pl.col("step").alias("iteration"),
        "rank",
        pl.col("dp_rank").alias("replica"),
        "stage",
        pl.when(pl.col("mb_id") >= 0).then("mb_id").alias("micro_batch"),
        pl.col("mc").alias("model_chunk"),
        pl.col("seq_id").alias("turn"),
        kind.replace(OPERATIONS).alias("kind"),
        kind.alias("group"),
        *((1e6 * pl.col(old).cast(pl.Float64)).alias(new) for old, new in (("start_ts", "start_us"), ("duration", "wall_us"))),
    )
    return Trace(operations=_typed(operations), iterations=_extents(operations), streams=True)


def from_spans(spans: pl.DataFrame, steps: pl.DataFrame, plans: Mapping[int, Plan], *, votes: bool = False) -> Trace:
    """The trace of spans as the log has them, of the attempts that counted. `steps`: plan_version, iteration, start_us and
    wall_us of what each rank stepped, or what an import says of it; without, iterations last as long as their spans. `votes`:
    an import's iterations end with one, as those under plans do."""
    operations = _typed(spans.with_columns(turn=pl.col("group_seq")))
    if not plans:
        return Trace(operations=_placed(operations), iterations=_with_steps(_extents(operations), steps), votes=votes)
    roles = pl.DataFrame(
        [(version, role.rank, role.replica, role.stage) for version, plan in plans.items() for role in plan.roles],
        schema=dict.fromkeys(("plan_version", "rank", "replica", "stage"), pl.Int64),
        orient="row",
    )
    placed = operations.drop("replica", "stage").join(roles, on=["plan_version", "rank"], how="left", maintain_order="left")
    return Trace(operations=_typed(placed), iterations=_extents(steps), votes=True)


def _typed(operations: pl.DataFrame) -> pl.DataFrame:
    """With all columns of a trace, null where the source has none."""
    if "own_us" not in operations.columns:
        own = [name for name in ("compute_us", "wall_us") if name in operations.columns]
        operations = operations.with_columns(own_us=pl.coalesce(own))
    waits = [name for name in ("wait_dp_us", "wait_tp_us") if name in operations.columns]
    if waits and "within_us" not in operations.columns:
        operations = operations.with_columns(within_us=pl.sum_horizontal(waits))
    return operations.select(
        (pl.col(name) if name in operations.columns else pl.lit(None).alias(name)).cast(dtype)
        for name, dtype in COLUMNS.items()
    )


def _extents(rows: pl.DataFrame) -> pl.DataFrame:
    """Begin and end of each iteration, of all that began and ended in it."""
    start, wall = (pl.col(name).cast(pl.Float64) for name in ("start_us", "wall_us"))
    extents = rows.group_by("plan_version", "iteration").agg(begin_us=start.min(), end_us=(start + wall).max())
    return extents.with_columns(pl.col("plan_version", "iteration").cast(pl.Int64)).sort("plan_version", "iteration")


def _with_steps(extents: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Iterations from where the source says that they began to where it says that they ended; where that is of another clock
    than the spans, so that nothing overlaps, as they are."""
    if not steps.height:
        return extents
    both = extents.join(_extents(steps), on=["plan_version", "iteration"], how="left", suffix="_said", maintain_order="left")
    overlap = (pl.col("begin_us_said") < pl.col("end_us")) & (pl.col("end_us_said") > pl.col("begin_us"))
    begin, end = pl.min_horizontal("begin_us", "begin_us_said"), pl.max_horizontal("end_us", "end_us_said")
    return both.select(
        "plan_version",
        "iteration",
        begin_us=pl.when(overlap).then(begin).otherwise("begin_us"),
        end_us=pl.when(overlap).then(end).otherwise("end_us"),
    )


def _placed(operations: pl.DataFrame) -> pl.DataFrame:
    """Spans without a plan: the replica and stage of every rank that executes chunks; micro-batches, which may be numbered
    within a replica, unique in the iteration; stages for layers where there are none."""
    chunks = operations.filter(pl.col("kind").is_in(CHUNK_KINDS) & pl.col("micro_batch").is_not_null())
    if not chunks.height:
        return operations
    begins = chunks.group_by("iteration", "rank").agg(pl.col("start_us").min(), pl.col("first_layer").min())
    begins = begins.with_columns(late_us=pl.col("start_us") - pl.col("start_us").min().over("iteration"))
    order = begins.group_by("rank").agg(pl.col("first_layer").min(), pl.col("late_us").median()).sort(
        "first_layer", "late_us", "rank"
    )  # fmt: skip
    ranks = order["rank"].to_list()
    replica_of = _replicas(ranks, operations)
    stages: dict[int, list[int]] = {}
    for rank in ranks:
        stages.setdefault(replica_of[rank], []).append(rank)
    places = pl.DataFrame(
        [(rank, replica, stage) for replica, own in stages.items() for stage, rank in enumerate(own)],
        schema=dict.fromkeys(("rank", "replica", "stage"), pl.Int64),
        orient="row",
    )
    placed = operations.drop("replica", "stage").join(places, on="rank", how="left", maintain_order="left")
    chunk = pl.col("kind").is_in(CHUNK_KINDS)
    replicas = placed.filter(chunk).group_by("iteration", "micro_batch").agg(pl.col("replica").n_unique())["replica"]
    most = placed["micro_batch"].max() + 1 if (replicas > 1).any() else 0  # type: ignore[operator]  # of any dtype
    return _typed(
        placed.with_columns(
            micro_batch=pl.col("micro_batch") + pl.col("replica") * most,
            n_layers=pl.when(chunk & pl.col("first_layer").is_null()).then(1).otherwise("n_layers"),
            first_layer=pl.when(chunk).then(pl.coalesce("first_layer", "stage")).otherwise("first_layer"),
        )
    )


def _replicas(ranks: list[int], operations: pl.DataFrame) -> dict[int, int]:
    """Rank -> its replica: who is connected by messages, numbered in the order of the least rank."""
    messages = operations.filter(pl.col("kind").is_in(["send", "recv"])).select("rank", "peer").drop_nulls().unique()
    peers: dict[int, set[int]] = {rank: set() for rank in sorted(ranks)}
    for one, other in messages.iter_rows():
        if one in peers and other in peers:
            peers[one].add(other)
            peers[other].add(one)
    found: dict[int, int] = {}
    numbers = count()
    for first in peers:
        if first in found:
            continue
        number, reached = next(numbers), [first]
        while reached:
            if (rank := reached.pop()) not in found:
                found[rank] = number
                reached += peers[rank]
    return found
