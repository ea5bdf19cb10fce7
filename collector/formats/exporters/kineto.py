"""A run as PyTorch profiler traces, a file per rank in a new folder, for Holistic Trace Analysis and other readers of those.

Work and messages are kernels, each with the launch that such readers look it up by, at its beginning and of no length; messages
and collectives are named as NCCL's, by which they tell communication from computation. What a rank does beside is an annotation
of the host, as are iterations. The arguments of an event hold all of its span, so that an import gives the span again; those of
a micro-batch's first forward pass the lengths of its documents too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import polars

from unskew.collector.events import CHUNK_NAMES, COLLECTIVE_KINDS
from unskew.collector.formats.exporters.bars import bars, lane_order
from unskew.collector.formats.exporters.lengths import lengths_of
from unskew.collector.formats.imported import FormatError
from unskew.collector.formats.importers.kineto_own import KEY
from unskew.collector.read.reader import Reader

_KERNELS = {
    **CHUNK_NAMES,
    "optimizer": "optimizer",
    "send": "ncclDevKernel_SendRecv",
    "recv": "ncclDevKernel_SendRecv",
    "all_reduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
    "all_gather": "ncclDevKernel_AllGather_RING_LL",
}
_COMMITS = """
    select rank, iteration, (payload->>'start_us')::bigint as start_us, (payload->>'wall_us')::bigint as wall_us
    from events where run = ? and type like 'iteration_committed@%'
"""
_HOST, _FIRST_STREAM = 1, 7
_ARGUMENTS = (
    "kind", "epoch", "attempt", "iteration", "micro_batch", "first_layer", "n_layers", "peer", "bytes", "group", "compute_us",
    "wait_tp_us", "device", "lengths",
)  # fmt: skip


def write(reader: Reader, run: str, path: Path) -> str:
    """Write the files into the folder `path`, which is there; returns a sentence on what is in it. Raises `FormatError` when
    the run has no spans."""
    spans = bars(reader, run, counted=True)
    if spans.is_empty():
        raise FormatError(f"run {run} has no spans to show")
    spans = _with_lengths(spans, lengths_of(reader, run))
    steps, streams = _steps(spans, reader.sql(_COMMITS, [run])), lane_order(set(spans["lane"]))
    ranks = spans["rank"].unique().sort().to_list()
    for rank in ranks:
        own = polars.col("rank") == rank
        with (path / f"rank-{rank}.json").open("wb") as file:
            # The blank behind the colon is what HTA looks for.
            file.write(b'{"schemaVersion":1,"distributedInfo":{"rank": %d,"world_size":%d},\n' % (rank, len(ranks)))
            file.write(b'"%s":%s,"traceEvents":[\n' % (KEY.encode(), msgspec.json.encode(run)))
            file.write(
                b",\n".join(msgspec.json.encode(event) for event in _events(spans.filter(own), steps.filter(own), streams))
            )
            file.write(b"\n]}\n")
    return f"{spans.height:,} spans of {len(ranks)} ranks, a file each"


def _with_lengths(spans: polars.DataFrame, lengths: polars.DataFrame) -> polars.DataFrame:
    """The lengths of each micro-batch with the first of its forward passes."""
    of = ["iteration", "micro_batch"]
    first = (polars.col("kind") == "F") & polars.struct("kind", *of).is_first_distinct()
    known = spans.join(lengths, on=of, how="left", maintain_order="left")
    return known.with_columns(polars.when(first).then("lengths"))


def _steps(spans: polars.DataFrame, commits: polars.DataFrame) -> polars.DataFrame:
    """When each rank's iterations began and ended: as committed, else from the first span to the last."""
    keys = ["rank", "iteration"]
    extents = spans.group_by(keys).agg(polars.col("start_us").min(), polars.col("end_us").max())
    committed = commits.select(*keys, begun=polars.col("start_us"), ended=polars.col("start_us") + polars.col("wall_us"))
    return (
        extents.join(committed, on=keys, how="left")
        .with_columns(start_us=polars.min_horizontal("start_us", "begun"), end_us=polars.max_horizontal("end_us", "ended"))
        .sort(keys)
    )


def _events(spans: polars.DataFrame, steps: polars.DataFrame, streams: list[str]) -> Iterator[dict[str, Any]]:
    for stream, name in enumerate(streams):
        yield {"ph": "M", "name": "thread_name", "ts": 0, "pid": 0, "tid": _FIRST_STREAM + stream, "args": {"name": name}}
    for iteration, start_us, end_us in steps.select("iteration", "start_us", "end_us").iter_rows():
        yield _complete("user_annotation", f"ProfilerStep#{iteration}", (start_us, end_us), _HOST, {})
    correlations = count(1)
    for row in spans.iter_rows(named=True):
        arguments = {name: row[name] for name in _ARGUMENTS if row[name] is not None} | {"wall_us": row["wall_us"]}
        times = (row["start_us"], row["end_us"])
        if row["kind"] not in _KERNELS:
            yield _complete("user_annotation", row["kind"], times, _HOST, {KEY: arguments})
            continue
        correlation, stream = next(correlations), _FIRST_STREAM + streams.index(row["lane"])
        yield _complete("cuda_runtime", "cudaLaunchKernel", (times[0], times[0]), _HOST, {"correlation": correlation})
        device = {"device": 0, "stream": stream, "correlation": correlation, **_collective(row)}
        yield _complete("kernel", _KERNELS[row["kind"]], times, stream, {**device, KEY: arguments})


def _collective(row: dict[str, Any]) -> dict[str, Any]:
    """What PyTorch says of a collective's kernel."""
    if row["kind"] not in COLLECTIVE_KINDS:
        return {}
    size = {} if row["bytes"] is None else {"In msg nelems": row["bytes"], "dtype": "Byte"}
    group = {} if row["group"] is None else {"Process Group Name": row["group"]}
    return {"Collective name": row["kind"].replace("_", ""), **size, **group}


def _complete(category: str, name: str, times: tuple[int, int], thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    start_us, end_us = times
    return {
        "ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": start_us, "dur": end_us - start_us,
        "args": arguments,
    }  # fmt: skip
