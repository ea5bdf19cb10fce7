"""A trace whose messages run on streams of their own, as NDTimeline's do (ByteDance, OSDI'25) -> what waits for what.

All iterations and replicas are taken to wait alike, as in the first iteration of replica 0 that has as many operations as most
(a trace may begin within one):

* compute, gradient and parameter collectives, and the four kinds of messages: each a stream in which one follows the other;
* receive -> compute -> send; a receive is launched after the compute before that one; the first backward message after the
  last but one forward before the first backward;
* the last gather of parameters before the first forward; behind the last compute: collection of garbage, layer norms,
  embeddings, gradients, clipping, optimizer. Where gradients are reduced beside the backward passes (there is a separate
  all-reduce for those that are not), layer norms wait for that instead, and the separate gradients follow the embeddings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

import msgspec
import polars as pl

from unskew.analytics.diagnosis.trace.model import OPERATIONS, Trace
from unskew.analytics.diagnosis.trace.replay import Graph, GraphError, Operation, TraceRecording

FORWARD, BACKWARD = "forward-compute", "backward-compute"
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
EMBEDDING, LAYER_NORM, CLIP = "embedding-grads-all-reduce", "layernorm-grads-all-reduce", "optimizer-clip-main-grad"
GARBAGE, OPTIMIZER = "gc", "optimizer"
ACROSS = (GATHER, SCATTER, SEPARATE, CLIP)
"""In which all replicas take part."""
WAITS = frozenset({*MESSAGES, *ACROSS, EMBEDDING, LAYER_NORM})

_Name = tuple[str, int, int]
"""(what it is called, turn, stage): an operation of every iteration and replica."""


class _Pattern(msgspec.Struct, frozen=True):
    """What one replica does in one iteration: its operations, what each needs, and which groups end together."""

    needs: dict[_Name, list[_Name]]
    groups: list[tuple[_Name, ...]]
    across: frozenset[_Name]
    """Operations in which all replicas take part."""


def record(trace: Trace) -> TraceRecording:
    """The recording of a trace; iterations that lack an operation are left out and named. Raises `GraphError`."""
    frame = trace.operations
    _check(frame)
    pattern = _pattern(_model_iteration(frame))
    replicas = frame["replica"].unique().sort().to_list()
    names = list(pattern.needs)
    number = {(replica, name): i for i, (replica, name) in enumerate((r, n) for r in replicas for n in names)}
    keys = pl.DataFrame(
        [(r, group, turn, stage, i) for (r, (group, turn, stage)), i in number.items()],
        schema={"replica": pl.Int64, "group": pl.String, "turn": pl.Int64, "stage": pl.Int64, "operation": pl.Int64},
        orient="row",
    )
    rows = frame.join(keys, on=["replica", "group", "turn", "stage"], how="inner")
    counts = rows.group_by("iteration").agg(pl.col("operation").n_unique().alias("n")).sort("iteration")
    iterations = counts.filter(pl.col("n") == len(number))["iteration"].to_list()
    if not iterations:
        raise GraphError("no step of the trace has the same operations on every worker")
    rows = rows.filter(pl.col("iteration").is_in(iterations)).sort("operation", "iteration")
    start, wall = (rows[name].to_numpy().reshape(len(number), len(iterations)) for name in ("start_us", "wall_us"))
    extents = trace.iterations.filter(pl.col("iteration").is_in(iterations)).sort("iteration")
    begin, end = extents["begin_us"].to_numpy(), extents["end_us"].to_numpy()
    about = rows.unique("operation", keep="first").sort("operation")
    operations = tuple(
        Operation(kind, rank, replica, stage, micro_batch if kind in {FORWARD, BACKWARD} else None)
        for kind, rank, replica, stage, micro_batch in about.select(
            "group", "rank", "replica", "stage", "micro_batch"
        ).iter_rows()
    )
    return TraceRecording(
        graph=_graph(pattern, replicas, number, operations),
        iterations=tuple(iterations),
        start_us=start - begin,
        wall_us=wall,
        iteration_us=end - begin,
        waits=WAITS,
        left_out=tuple(counts.filter(pl.col("n") != len(number))["iteration"].to_list()),
    )


def _check(frame: pl.DataFrame) -> None:
    unknown = sorted(set(frame["group"].unique()) - set(OPERATIONS))
    if unknown:
        raise GraphError(f"operation type {unknown[0]} is not known, allowed: {', '.join(sorted(OPERATIONS))}")
    if frame["model_chunk"].max() != 0:
        raise GraphError("the trace interleaves model chunks (mc above 0), which is not replayed: only one chunk per stage is")


def _model_iteration(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows of the iteration, of the first replica, that all others are taken to be like."""
    mine = frame.filter(pl.col("replica") == frame["replica"].min())
    sizes = mine.group_by("iteration").len()
    usual = sizes["len"].mode().max()
    return mine.filter(pl.col("iteration") == sizes.filter(pl.col("len") == usual)["iteration"].min())


def _pattern(frame: pl.DataFrame) -> _Pattern:
    """From one replica's one iteration."""
    names = [(optype, seq, stage) for optype, seq, stage in frame.select("group", "turn", "stage").iter_rows()]
    needs: dict[_Name, list[_Name]] = {name: [] for name in names}
    stages = frame["stage"].unique().sort().to_list()
    _check_step(needs, stages)
    groups: list[tuple[_Name, ...]] = []
    for stage in stages:
        mine = frame.filter(pl.col("stage") == stage).sort("start_us", "turn", "group")
        work = _named(mine, FORWARD, BACKWARD)
        for stream in (work, _named(mine, GATHER, SCATTER), *(_named(mine, message) for message in MESSAGES)):
            _chain(needs, stream)
        for kind, message in ((FORWARD, "forward"), (BACKWARD, "backward")):
            for _, seq, _ in _named(mine, f"{message}-recv"):
                needs[kind, seq, stage].append((f"{message}-recv", seq, stage))
                if (kind, seq - 1, stage) in needs:
                    needs[f"{message}-recv", seq, stage].append((kind, seq - 1, stage))
            for _, seq, _ in _named(mine, f"{message}-send"):
                needs[f"{message}-send", seq, stage].append((kind, seq, stage))
        turn = next(i for i, name in enumerate(work) if name[0] == BACKWARD)
        for message in ("backward-send", "backward-recv"):
            if turn >= 2 and (message, 0, stage) in needs:
                needs[message, 0, stage].append(work[turn - 2])
        if gathers := _named(mine, GATHER):
            needs[next(name for name in work if name[0] == FORWARD)].append(gathers[-1])
        ended = mine.filter(pl.col("group").is_in([FORWARD, BACKWARD])).with_columns(end=pl.col("start_us") + pl.col("wall_us"))
        optype, seq, end_stage = ended.sort("end").select("group", "turn", "stage").row(-1)
        last, scatters, separate = (optype, seq, end_stage), _named(mine, SCATTER), _named(mine, SEPARATE)
        reduced = separate or scatters
        after = [*_named(mine, LAYER_NORM), *_named(mine, EMBEDDING), *reduced, *_named(mine, CLIP), *_named(mine, OPTIMIZER)]
        _chain(needs, [last, *_named(mine, GARBAGE), *after])
        if separate and scatters:
            _chain(needs, [last, *scatters, after[0]])
    groups += [(name, _other_side(name)) for name in names if name[0].endswith("-send")]
    groups += [(name,) for name in names if name[0] in ACROSS and name[0] != CLIP]
    groups += [tuple(name for name in names if name[0] == kind) for kind in (EMBEDDING, CLIP)]
    across = frozenset(name for name in names if name[0] in ACROSS)
    return _Pattern(needs, [group for group in groups if group], across)


def _check_step(names: Collection[_Name], stages: Iterable[int]) -> None:
    """Raise `GraphError` when work or one side of a message is missing."""
    for stage in stages:
        for kind in (FORWARD, BACKWARD):
            if not any(name[0] == kind and name[2] == stage for name in names):
                raise GraphError(f"stage {stage} has no {kind}, of which every stage needs one per micro-batch")
    messages = [name for name in names if name[0] in MESSAGES]
    if not messages and len({stage for _, _, stage in names}) > 1:
        raise GraphError("the trace has several stages and no messages between them, so nobody knows what waits for what")
    for optype, seq, stage in messages:
        other = _other_side((optype, seq, stage))
        if other not in names:
            raise GraphError(f"{optype} {seq} of stage {stage} has no {other[0]} on stage {other[2]}")
        kind = FORWARD if optype.startswith("forward") else BACKWARD
        if (kind, seq, stage) not in names:
            raise GraphError(f"{optype} {seq} of stage {stage} has no {kind}")


def _other_side(name: _Name) -> _Name:
    """The receive of a send, the send of a receive: forwards to the next stage, backwards to the one before."""
    optype, seq, stage = name
    sends, forward = optype.endswith("-send"), optype.startswith("forward")
    other = optype.replace("send", "recv") if sends else optype.replace("recv", "send")
    return other, seq, stage + (1 if forward == sends else -1)


def _named(frame: pl.DataFrame, *optypes: str) -> list[_Name]:
    rows = frame.filter(pl.col("group").is_in(optypes)).select("group", "turn", "stage")
    return [(optype, seq, stage) for optype, seq, stage in rows.iter_rows()]


def _chain(needs: dict[_Name, list[_Name]], stream: Iterable[_Name]) -> None:
    for before, after in pairwise(stream):
        if before not in needs[after]:
            needs[after].append(before)


def _graph(
    pattern: _Pattern, replicas: list[int], number: dict[tuple[int, _Name], int], operations: tuple[Operation, ...]
) -> Graph:
    """The pattern in every replica; those operations in which all take part end together."""
    groups: list[tuple[int, ...]] = []
    for members in pattern.groups:
        apart = [tuple(number[replica, name] for name in members) for replica in replicas]
        groups += [tuple(i for part in apart for i in part)] if members[0] in pattern.across else apart
    needs = tuple(tuple(number[replica, need] for need in pattern.needs[name]) for replica, name in number)
    return Graph(operations, needs, tuple(groups))
