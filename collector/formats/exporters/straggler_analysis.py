"""A run of ours as a straggler-analysis trace, so that ByteDance's analyser can judge it (docs/reference/formats.md).

Their model of dependencies is built once for all steps and replicas, so a trace holds the whole iterations of one plan under
which all replicas do the same; and it wants every type of operation on every rank: what our runtime does not do takes no time
of its own, where it would be. Those that others take part in end together, as their analyser asks: the first and the last stage
of a replica in embedding-grads-all-reduce, the replicas in what belongs to data parallelism, all in optimizer-clip-main-grad.
What a rank does of one type it does one after the other. Of a tensor-parallel group one rank stands for all, as in theirs:
who computes longest. The lengths of documents, for which theirs have no column, are in the file's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars
import pyarrow  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet  # type: ignore[import-untyped]

from unskew.collector.formats.exporters.lengths import lengths_of
from unskew.collector.formats.imported import FormatError
from unskew.collector.formats.importers.straggler_analysis import COLUMNS, LENGTHS, operations
from unskew.collector.read.reader import Reader

_SPANS = """
    select kind, rank, plan_version, iteration, micro_batch, first_layer, peer, start_us, wall_us,
        wall_us - coalesce(wait_tp_us, 0) as own_us from spans
    semi join iterations using (run, iteration, plan_version, attempt) where run = ? order by iteration, rank, start_us, seq
"""
_COMPUTE = {"F": "forward-compute", "B": "backward-compute"}
_MESSAGES = ("send", "recv")
_REDUCTIONS = ("all_reduce", "reduce_scatter")
_AT_LEAST = {
    "dp_rank": polars.Int8, "stage": polars.Int8, "rank": polars.Int16, "step": polars.Int64, "seq_id": polars.Int32,
    "mc": polars.Int8, "mb_id": polars.Int8, "gmc": polars.Int16,
}  # fmt: skip
"""The published types; wider where a number does not fit."""
_WIDER = (polars.Int16, polars.Int32, polars.Int64)


def write(reader: Reader, run: str, path: Path) -> str:
    """Write the trace of `run`; returns a sentence on what is in it. Raises `FormatError` when the run has no such trace."""
    rows = trace(reader, run)
    table = rows.to_arrow()
    place = table.schema.get_field_index("optype")
    # Their reader wants the types of operation as categories.
    category = pyarrow.array(rows["optype"].cast(polars.String).to_list()).dictionary_encode()
    steps = rows["step"]
    lengths = lengths_of(reader, run).filter(polars.col("iteration").is_in(steps.unique().implode()))
    known = {LENGTHS: msgspec.json.encode(lengths.rows())} if lengths.height else None
    table = table.set_column(place, "optype", category).replace_schema_metadata(known)
    pyarrow.parquet.write_table(table, path, compression="zstd")
    return f"{rows.height:,} operations of {steps.n_unique()} iterations ({steps.min()!r} to {steps.max()!r})"


def trace(reader: Reader, run: str) -> polars.DataFrame:
    """The 11 columns in the published types, under the plan with the most iterations; an imported trace as it came."""
    started = reader.sql("select options->>'format' as format from runs where run = ?", [run])["format"].to_list()
    if started == ["straggler-analysis"]:
        return _published_types(operations(reader, run))
    spans, places = reader.sql(_SPANS, [run]), _places(reader, run)
    if places.is_empty() or not spans["kind"].is_in(list(_COMPUTE)).any():
        raise FormatError(f"run {run} has no chunks under a plan; this format needs them")
    for own in _plan_by_plan(spans):
        if "W" not in own["kind"] and (rows := _of_one_plan(own, places)).height:
            return _published_types(rows)
    if "W" in spans["kind"]:
        raise FormatError(f"run {run} has backward passes split in two (W chunks), which straggler-analysis has no type for")
    raise FormatError(
        f"run {run} has no iteration in which all replicas execute equally many micro-batches; this format needs it"
    )


def _plan_by_plan(spans: polars.DataFrame) -> Iterator[polars.DataFrame]:
    """The spans of each plan, the one with the most iterations first; of equals the older."""
    iterations = spans.group_by("plan_version").agg(polars.col("iteration").n_unique())
    for plan_version in iterations.sort("iteration", "plan_version", descending=[True, False])["plan_version"]:
        yield spans.filter(polars.col("plan_version") == plan_version)


def _of_one_plan(spans: polars.DataFrame, places: polars.DataFrame) -> polars.DataFrame:
    everybody = spans.join(places, on=["plan_version", "rank"], how="inner").with_columns(
        end_us=polars.col("start_us") + polars.col("wall_us"), of_group=_busiest()
    )
    placed = _reduced_together(everybody.filter(polars.col("rank") == polars.col("of_group")))
    parallel = placed["dp_rank"].n_unique() > 1
    computes = _computes(placed)
    rows = [computes, _messages(everybody), _at_the_ends(computes), _without_time(placed, parallel=parallel)]
    rows += [_of_ranks(placed, {"optimizer": "optimizer"})]
    rows += [_of_ranks(placed, dict.fromkeys(_REDUCTIONS, "grads-reduce-scatter"))] if parallel else []
    return _whole_steps(_numbered(polars.concat(rows)))


def _busiest() -> polars.Expr:
    """Of a rank's tensor-parallel group who computes longest: others wait for it within their chunks, which take as long."""
    own_us = polars.when(polars.col("kind").is_in(list(_COMPUTE))).then("own_us").sum().over("rank")
    return polars.col("rank").sort_by(own_us, "rank", descending=[True, False]).first().over("of_group")


def _reduced_together(placed: polars.DataFrame) -> polars.DataFrame:
    """A reduction ends on all replicas at once, and begins when the one before has: on the virtual device each replica reduces
    by its own clock, and pieces of layers that different ranks hold alike are reduced side by side."""
    reduced = polars.col("kind").is_in(_REDUCTIONS)
    nth = polars.int_range(polars.len()).over("iteration", "rank", order_by="start_us")
    ends = (
        (reductions := placed.filter(reduced).with_columns(nth=nth))
        .group_by("iteration", "stage", "nth")
        .agg(polars.col("end_us").max())
        .sort("nth")
        .with_columns(polars.col("end_us").cum_max().over("iteration", "stage"))
        .with_columns(before_us=polars.col("end_us").shift().over("iteration", "stage"))
    )
    together = reductions.drop("end_us").join(ends, on=["iteration", "stage", "nth"], maintain_order="left")
    together = together.with_columns(start_us=polars.max_horizontal("start_us", "before_us"))
    return polars.concat([placed.filter(~reduced), together.select(placed.columns)])


def _places(reader: Reader, run: str) -> polars.DataFrame:
    """plan_version, rank, its group (by its first shard), dp_rank, stage, and the first layers of the rank's model
    chunks with the numbers of these."""
    rows: list[dict[str, Any]] = []
    for plan_version, plan in reader.sql("select plan_version, plan::varchar from plans where run = ?", [run]).iter_rows():
        roles = msgspec.json.decode(plan)["roles"]
        replicas = sorted({role["replica"] for role in roles})
        groups = {
            (role["replica"], role["stage"]): role["rank"]
            for role in sorted(roles, key=lambda role: -role.get("shard", 0))
            if role.get("part")
        }
        ranges = {role["rank"]: [role["first_layer"], *(first for first, _ in role.get("more", ()))] for role in roles}
        for role in roles:
            replica = [first for other in roles if other["replica"] == role["replica"] for first in ranges[other["rank"]]]
            first_layers: Sequence[int] = ranges[role["rank"]]
            rows.append(
                {
                    "plan_version": plan_version,
                    "rank": role["rank"],
                    "of_group": groups[role["replica"], role["stage"]] if role.get("part") else role["rank"],
                    "dp_rank": replicas.index(role["replica"]),  # they count from 0 without gaps
                    "stage": role["stage"],
                    "chunk_first": first_layers,
                    "chunk_global": [sorted(set(replica)).index(first) for first in first_layers],
                }
            )
    schema: dict[str, Any] = {
        "plan_version": polars.Int64, "rank": polars.Int32, "of_group": polars.Int32, "dp_rank": polars.Int64,
        "stage": polars.Int64, "chunk_first": polars.List(polars.Int64), "chunk_global": polars.List(polars.Int64),
    }  # fmt: skip
    return polars.DataFrame(rows, schema=schema)


_PLACE = ["dp_rank", "stage", "rank", "iteration"]


def _row(**columns: polars.Expr) -> list[polars.Expr]:
    """The columns that all parts share; -1 where a number has no meaning."""
    none = {name: polars.lit(-1) for name in ("mc", "mb_id", "gmc")}
    times = {"start_us": polars.col("start_us"), "end_us": polars.col("end_us")}
    return [
        *(polars.col(name) for name in _PLACE),
        *((columns.get(name, value)).cast(polars.Int64).alias(name) for name, value in {**times, **none}.items()),
        columns["optype"].cast(polars.String).alias("optype"),
    ]


def _computes(placed: polars.DataFrame) -> polars.DataFrame:
    """Chunks, those executed in parts as one; the model chunk is the rank's range of layers in which the chunk begins."""
    return (
        placed.filter(polars.col("kind").is_in(list(_COMPUTE)))
        .with_columns(mc=polars.struct("chunk_first", "first_layer").map_elements(_chunk_of, return_dtype=polars.Int64))
        .group_by(*_PLACE, "kind", "micro_batch", "mc", maintain_order=True)
        .agg(polars.col("start_us").min(), polars.col("end_us").max(), polars.col("chunk_global").first())
        .select(
            _row(
                optype=polars.col("kind").replace_strict(_COMPUTE),
                mc=polars.col("mc"),
                gmc=polars.col("chunk_global").list.get(polars.col("mc")),
                mb_id=polars.col("micro_batch"),
            )
        )
    )


def _chunk_of(row: dict[str, Any]) -> int:
    return max((place for place, first in enumerate(row["chunk_first"]) if first <= row["first_layer"]), default=0)


def _messages(placed: polars.DataFrame) -> polars.DataFrame:
    """Messages; one ends, on both sides, when its receiver has it: the n-th taken is the n-th sent.

    Activations are sent before their micro-batch's backward pass begins on the rank, and received before its forward pass.
    What two tensor-parallel groups pass each other for a micro-batch is one message; those that were on their way together
    (our senders do not wait) come one after the other.
    """
    of = ["iteration", "rank", "micro_batch", "first_layer"]
    chunks = placed.filter(polars.col("kind").is_in(list(_COMPUTE)))
    begins = chunks.pivot("kind", index=of, values="start_us", aggregate_function="min")
    messages = placed.filter(polars.col("kind").is_in(_MESSAGES)).join(begins, on=of, how="left")
    forward = (
        polars.when(polars.col("kind") == "send")
        .then(polars.col("start_us") < polars.col("B"))
        .otherwise(polars.col("end_us") <= polars.col("F"))
        .fill_null(value=False)
    )
    of_peer = placed.select("plan_version", polars.col("rank").alias("peer"), peer_group="of_group").unique()
    one = [*_PLACE, "plan_version", "kind", "micro_batch", "first_layer", "peer", "forward"]
    messages = (
        messages.with_columns(forward=forward)
        .join(of_peer, on=["plan_version", "peer"], how="left")
        .with_columns(rank=polars.col("of_group"), peer=polars.coalesce("peer_group", "peer"))
        .group_by(one, maintain_order=True)
        .agg(polars.col("start_us").min(), polars.col("end_us").max())
    )
    channel = ["iteration", "micro_batch", "forward", "rank", "peer", "nth"]
    messages = messages.with_columns(nth=polars.int_range(polars.len()).over("kind", *channel[:-1], order_by="start_us"))
    received = messages.filter(polars.col("kind") == "recv").select(
        "iteration", "micro_batch", "forward", "nth", polars.col("rank").alias("peer"), polars.col("peer").alias("rank"),
        received_us="end_us",
    )  # fmt: skip
    messages = messages.join(received, on=channel, how="left")
    end = polars.when(polars.col("kind") == "send").then(polars.max_horizontal("received_us", "start_us"))
    name = polars.concat_str(
        polars.when(polars.col("forward")).then(polars.lit("forward-")).otherwise(polars.lit("backward-")), polars.col("kind")
    )
    rows = messages.select(_row(optype=name, end_us=end.otherwise(polars.col("end_us")))).sort("start_us", maintain_order=True)
    own = ["iteration", "rank", "optype"]
    rows = rows.with_columns(polars.col("end_us").cum_max().over(own))
    return rows.with_columns(start_us=polars.max_horizontal("start_us", polars.col("end_us").shift().over(own)))


def _at_the_ends(computes: polars.DataFrame) -> polars.DataFrame:
    """Messages that nobody sends: of several model chunks per rank their model wants one for each, also where a replica begins
    and ends."""
    if computes["mc"].max() == 0:
        return computes.clear()
    optype, chunk = polars.col("optype"), polars.col("gmc")
    first, last = chunk == computes["gmc"].min(), chunk == computes["gmc"].max()
    return polars.concat(
        computes.filter((optype == compute) & at).select(
            _row(optype=polars.lit(message), start_us=polars.col(moment), end_us=polars.col(moment))
        )
        for compute, at, message, moment in (
            ("forward-compute", first, "forward-recv", "start_us"),
            ("forward-compute", last, "forward-send", "end_us"),
            ("backward-compute", last, "backward-recv", "start_us"),
            ("backward-compute", first, "backward-send", "end_us"),
        )
    )


def _of_ranks(placed: polars.DataFrame, names: dict[str, str]) -> polars.DataFrame:
    """What a rank does as a whole."""
    chunk = polars.lit(0 if "all_reduce" in names else -1)
    return placed.filter(polars.col("kind").is_in(list(names))).select(
        _row(optype=polars.col("kind").replace_strict(names), mc=chunk)
    )


def _without_time(placed: polars.DataFrame, *, parallel: bool) -> polars.DataFrame:
    """Operations that their model asks for and our runtime has not: of no duration but the wait for those who take part.

    Our ranks reduce their gradients as soon as they have computed, and wait for all others before they step. So their model is
    told that reductions run beside the rest, which separate-grads-all-reduce does, and what others take part in comes after.
    """
    kind, end = polars.col("kind"), polars.col("end_us")
    ends = polars.col("stage").is_in([placed["stage"].min(), placed["stage"].max()])
    always = polars.lit(value=True)
    moments = (
        placed.group_by(_PLACE, maintain_order=True)
        .agg(
            begun=polars.col("start_us").min(),
            computed=end.filter(kind.is_in(list(_COMPUTE))).max(),
            reduced=end.filter(kind.is_in([*_COMPUTE, *_REDUCTIONS])).max(),
        )
        .with_columns(
            begun=polars.col("begun").min().over("iteration", "stage"),
            embedded=polars.when(ends)
            .then(polars.col("reduced").max().over("iteration", "dp_rank", ends))
            .otherwise("reduced"),
        )
        .with_columns(separate=polars.col("embedded").max().over("iteration", "stage"))
        .with_columns(clipped=polars.col("separate").max().over("iteration"))
    )
    before_clip = "separate" if parallel else "embedded"
    parts = [
        ("gc", "computed", "computed", always, -1),
        ("layernorm-grads-all-reduce", "reduced", "reduced", always, -1),
        ("embedding-grads-all-reduce", "reduced", "embedded", ends, -1),
        ("optimizer-clip-main-grad", before_clip, "clipped", always, -1),
    ]
    if parallel:
        parts += [
            ("params-all-gather", "begun", "begun", always, 0),
            ("separate-grads-all-reduce", "embedded", "separate", always, -1),
        ]
    return polars.concat(
        moments.filter(where).select(
            _row(optype=polars.lit(optype), start_us=polars.col(begin), end_us=polars.col(end), mc=polars.lit(chunk))
        )
        for optype, begin, end, where, chunk in parts
    )


def _numbered(rows: polars.DataFrame) -> polars.DataFrame:
    """Seconds from the beginning of the step, and the order of each type on each rank; replicas in the same order everywhere,
    as their analyser compares them row by row."""
    own = ["iteration", "rank", "optype"]
    begin = polars.col("start_us").min().over("iteration")
    return (
        rows.sort("iteration", "dp_rank", "stage", "optype", "start_us", maintain_order=True)
        .with_columns(seq_id=polars.int_range(polars.len()).over(own))
        .with_columns(
            start_ts=((polars.col("start_us") - begin) / 1e6).cast(polars.Float32),
            duration=((polars.col("end_us") - polars.col("start_us")) / 1e6).cast(polars.Float32),
        )
        .rename({"iteration": "step"})
    )


def _whole_steps(rows: polars.DataFrame) -> polars.DataFrame:
    """The steps in which every replica has the operations that most have."""
    names = ["stage", "optype", "seq_id"]
    operations = polars.concat_str(names, separator=" ").str.join(",").alias("operations")
    replicas = rows.sort("step", "dp_rank", *names).group_by("step", "dp_rank", maintain_order=True).agg(operations)
    usual = replicas.filter(polars.col("operations") == replicas["operations"].mode().max())
    whole = usual.group_by("step").len().filter(polars.col("len") == rows["dp_rank"].n_unique())
    return rows.filter(polars.col("step").is_in(whole["step"].implode()))


def _published_types(rows: polars.DataFrame) -> polars.DataFrame:
    return rows.select(
        polars.col(name).cast(_narrow(rows[name], name) if name in _AT_LEAST else _single(rows[name])) for name in COLUMNS
    )


def _single(values: polars.Series) -> Any:
    """Their times have 32 bits; more only where an imported trace came so."""
    if values.dtype.is_float() and (values.cast(polars.Float32).cast(polars.Float64) != values).any():
        return polars.Float64
    return polars.Float32 if values.dtype.is_float() else COLUMNS[values.name]


def _narrow(values: polars.Series, name: str) -> Any:
    least: Any = _AT_LEAST[name]
    for dtype in (least, *(wider for wider in _WIDER if wider != least)):
        limits = dtype.min(), dtype.max()
        if (
            values.is_empty()
            or polars.select((polars.lit(values.min()) >= limits[0]) & (polars.lit(values.max()) <= limits[1])).item()
        ):
            return dtype
    return polars.Int64
