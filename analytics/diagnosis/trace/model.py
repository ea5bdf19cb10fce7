"""What a run's operations did and when: the one form in which every analysis of a trace reads them.

Live runs write spans, importers write spans or exact operations: fill.py makes a `Trace` of either, and no analysis asks which.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import polars as pl

from unskew.collector.events import CHUNK_KINDS

PAUSES = {"gc": "gc_pause", "data_wait": "input_bound"}
"""Kinds of operations in which a rank could have worked -> the cause that they are evidence of."""

_NUMBERS = (
    "plan_version", "iteration", "rank", "replica", "stage", "micro_batch", "first_layer", "n_layers", "model_chunk", "peer",
    "turn",
)  # fmt: skip
COLUMNS: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(_NUMBERS, pl.Int64), "kind": pl.String, "group": pl.String, "start_us": pl.Float64, "wall_us": pl.Float64,
}  # fmt: skip


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of a run, a row of `COLUMNS` each, null where something is not known or has no meaning.

    `kind` is a span's. A chunk (kind F, B or W) has a `micro_batch`, unique in its iteration, and its layers. `group` is what
    the source calls the operation or the group of a collective, `turn` its number in it. `replica` and `stage` are null of a
    rank that executes nothing. `iterations`: plan_version, iteration, begin_us, end_us of those that were recorded whole.

    `streams`: messages and collectives run beside the chunks, on streams of their own that `group` names as NDTimeline does;
    else a rank does one thing after the other. `votes`: an iteration ends with a vote of all ranks, as ours do.
    """

    operations: pl.DataFrame
    iterations: pl.DataFrame
    streams: bool = False
    votes: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(self.operations["kind"].unique().to_list())

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
