"""A trace of ranks that do one thing after the other, under one plan -> what waited for what, and when it ran.

Our own runs are such, and foreign traces are taken to be. A chunk needs the chunk before it on its rank and its input: forwards
along the layers, backwards against them. Where the input comes from another rank a message lies between, a group of its send
and its receive: it runs once the sender has posted it and the receiver waits for it. A collective needs what its rank did
before, and is a group of its members (where the source does not name the group: of the ranks of its stage). So does the
optimiser, in our own runs behind a vote, which is a group of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import polars as pl

from unskew.analytics.diagnosis.trace.model import PAUSES, Trace
from unskew.analytics.diagnosis.trace.replay import Graph, GraphError, Operation, TraceRecording
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import CHUNK_KINDS, COLLECTIVE_KINDS

_Row = dict[str, Any]
_Key = tuple[Any, ...]
_Moment = tuple[int, int]
"""A row of an iteration, and which end of it: `BEGIN` or `END`."""
BEGIN, END = 0, 1
ROUNDED_US = 1  # what ends so much after the next one began has ended before it
_MESSAGES = ("send", "recv")
_SHAPE = ("rank", "kind", "micro_batch", "first_layer", "n_layers", "peer", "group", "turn")
"""Iterations whose rows are equal in these, one after the other, are of one shape: what waits for what is the same."""


class _Node(msgspec.Struct, frozen=True):
    """An operation of all iterations of a shape, and the rows that show when it began and ended."""

    key: _Key
    operation: Operation
    needs: tuple[_Key, ...]
    group: _Key
    began: _Moment
    ended: _Moment


class _Shape(msgspec.Struct):
    """Iterations that are alike, each with its first row; `nodes` in the order of their keys."""

    nodes: dict[_Key, _Node]
    iterations: list[int]
    first_rows: list[int]


def record(trace: Trace) -> TraceRecording:
    """The recording of the trace's iterations. Those that lack an operation are left out. Raises `GraphError`."""
    _check(trace)
    extents = {iteration: (begin, end) for _, iteration, begin, end in trace.iterations.iter_rows()}
    begun = {iteration: begin for iteration, (begin, _) in extents.items()}
    operations = trace.operations.filter(pl.col("stage").is_not_null() & pl.col("iteration").is_in(list(begun)))
    chunks = operations.filter(pl.col("kind").is_in(CHUNK_KINDS))
    n_layers = int(chunks.select((pl.col("first_layer") + pl.col("n_layers")).max()).item() or 0)
    rows = _in_order(operations)
    by_keys: dict[tuple[_Key, ...], list[_Shape]] = {}
    for shape in _shapes(rows, n_layers, votes=trace.votes):
        by_keys.setdefault(tuple(shape.nodes), []).append(shape)
    if not by_keys or not chunks.height:
        raise GraphError("no iteration has its chunks in the log")
    keys, shapes = max(by_keys.items(), key=lambda item: (sum(len(one.iterations) for one in item[1]), len(item[0])))
    template = shapes[0].nodes
    number = {key: i for i, key in enumerate(keys)}
    missing = [need for key in keys for need in template[key].needs if need not in number]
    if missing:
        raise GraphError(f"the log lacks {missing[0][0]} of rank {missing[0][1]}, which others needed, in every iteration")
    members: dict[_Key, list[int]] = {}
    for key in keys:
        members.setdefault(template[key].group, []).append(number[key])
    graph = Graph(
        tuple(template[key].operation for key in keys),
        tuple(tuple(number[need] for need in template[key].needs) for key in keys),
        tuple(tuple(group) for group in members.values()),
    )
    start, end = _times(rows, shapes)
    waited, ready, own = (pl.col(name).fill_null(0.0) for name in ("within_us", "runq_us", "own_us"))
    held = pl.min_horizontal(ready, pl.col("wall_us") - own - waited).clip(lower_bound=0.0)
    within, coreless, longer = (_of_chunks(rows, shapes, one) for one in (waited, ready, held))
    iterations = [iteration for shape in shapes for iteration in shape.iterations]
    order = np.argsort(iterations)
    iterations.sort()
    start, wall = start[:, order] - [begun[i] for i in iterations], np.maximum(end - start, 0.0)[:, order]
    return TraceRecording(
        graph=graph,
        iterations=tuple(iterations),
        start_us=start,
        wall_us=wall,
        iteration_us=np.array([extents[i][1] - extents[i][0] for i in iterations]),
        waits=frozenset({f"{side} {kind}" for side in ("send", "recv") for kind in "FB"} | {*COLLECTIVE_KINDS, "vote"}),
        left_out=tuple(sorted(set(begun) - set(iterations))),
        within_us=within[:, order],
        coreless_us=coreless[:, order],
        longer_us=longer[:, order],
        pauses_us=_pauses(operations, graph, start, {i: (column, begun[i]) for column, i in enumerate(iterations)}),
    )


def _check(trace: Trace) -> None:
    """Raise `GraphError` where the operations do not show what waits for what."""
    chunks = trace.operations.filter(pl.col("kind").is_in(CHUNK_KINDS) & pl.col("stage").is_not_null())
    whole = chunks.filter(pl.col("kind") == "F")  # a backward pass may be in parts, beside which gradients are summed
    if whole["first_layer"].n_unique() > 1 and whole["stage"].n_unique() == 1:
        raise GraphError("the trace has several stages and no messages between them, so nobody knows what waits for what")
    if chunks.select(pl.struct("iteration", "kind", "rank", "micro_batch", "first_layer").is_duplicated().any()).item():
        raise GraphError("a rank has a micro-batch more than once in an iteration, and its layers are not recorded")


def _in_order(operations: pl.DataFrame) -> pl.DataFrame:
    """What has a place in the graph: iteration by iteration, rank by rank, in order of time; messages behind the rest, those of
    each kind, peer and micro-batch by themselves. `turn`: how many collectives of its rank and group came before."""
    collective, message = pl.col("kind").is_in(COLLECTIVE_KINDS), pl.col("kind").is_in(_MESSAGES)
    before = pl.col("start_us").rank("min").over("iteration", "rank", "kind", "group") - 1
    return (
        operations.filter(collective | message | pl.col("kind").is_in([*CHUNK_KINDS, "optimizer"]))
        .with_columns(turn=pl.when(collective).then(before))
        .sort(
            "iteration",
            "rank",
            pl.when(message).then(pl.struct("kind", "peer", "micro_batch")),
            "start_us",
            maintain_order=True,
        )
    )


def _shapes(rows: pl.DataFrame, n_layers: int, *, votes: bool) -> list[_Shape]:
    """The shapes of the iterations, in the order in which they first occur."""
    alike = rows.with_row_index().select(pl.col("index").first().over(_SHAPE)).to_series().to_numpy()
    numbers = rows["iteration"].to_numpy()
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)] if len(numbers) else []
    found: dict[bytes, list[tuple[int, int]]] = {}
    for first, after in pairwise(borders):
        found.setdefault(alike[first:after].tobytes(), []).append((first, after))
    begun, ended = rows["start_us"].to_numpy(), (rows["start_us"] + rows["wall_us"]).to_numpy()
    shapes = []
    for parts in found.values():
        first, after = parts[0]
        of_one = rows[first:after].select(*_SHAPE, "replica", "stage").with_row_index("row").to_dicts()
        first_rows = [one for one, _ in parts]
        for row in of_one:
            at = row["row"] + np.array(first_rows)
            row["begun_us"], row["ended_us"] = begun[at], ended[at]
        nodes = _nodes(of_one, n_layers, votes=votes)
        shapes.append(_Shape(nodes, [int(numbers[one]) for one in first_rows], first_rows))
    return shapes


def _times(rows: pl.DataFrame, shapes: list[_Shape]) -> tuple[Array, Array]:
    """When each operation began and ended, [operation, iteration of each shape in turn] us."""
    moments = np.stack([rows["start_us"].to_numpy(), (rows["start_us"] + rows["wall_us"]).to_numpy()])

    def at(shape: _Shape, which: list[_Moment]) -> Array:
        row, side = np.array(which).T[:, :, None]
        return np.asarray(moments[side, row + np.array(shape.first_rows)])

    began = [at(shape, [node.began for node in shape.nodes.values()]) for shape in shapes]
    ended = [at(shape, [node.ended for node in shape.nodes.values()]) for shape in shapes]
    return np.concatenate(began, axis=1), np.concatenate(ended, axis=1)


def _of_chunks(rows: pl.DataFrame, shapes: list[_Shape], us: pl.Expr) -> Array:
    """A time within each chunk, 0 of other operations: [operation, iteration of each shape in turn] us."""
    chunks = pl.when(pl.col("kind").is_in(CHUNK_KINDS)).then(us).otherwise(0.0)
    times = rows.select(chunks).to_series().to_numpy()
    of = [times[np.array([node.began[0] for node in one.nodes.values()])[:, None] + np.array(one.first_rows)] for one in shapes]
    return np.concatenate(of, axis=1)


def _nodes(rows: list[_Row], n_layers: int, *, votes: bool) -> dict[_Key, _Node]:
    """All operations of a shape's iterations, whose rows are in order, with when it was in each (`begun_us`, `ended_us`)."""
    messages = _Messages(rows, n_layers)
    of_rank: dict[int, list[_Row]] = {}
    for row in rows:
        of_rank.setdefault(row["rank"], []).append(row)
    nodes = (node for mine in of_rank.values() for node in _of_rank(mine, messages, votes=votes))
    return {node.key: node for node in nodes}


def _of_rank(mine: list[_Row], messages: _Messages, *, votes: bool) -> Iterator[_Node]:
    """One rank's operations in order of time, each with the messages that it took. A chunk needs no collective that goes on
    beside it in any iteration: its rank began to sum the gradients of some layers while others were still to be computed. So
    of several collectives behind a chunk only the last needs all of it, where the others mostly begin before it ends."""
    before: tuple[_Key, ...] = ()
    work: tuple[_Key, ...] = ()
    of_work: tuple[_Key, ...] = ()
    until_us = dict[_Key, Array]()
    place = {name: mine[0][name] for name in ("rank", "replica", "stage")}
    rank, ended, others = place["rank"], None, 0
    for row, following in zip(mine, [*mine[1:], None], strict=True):
        kind, begins, ends = row["kind"], (row["row"], BEGIN), (row["row"], END)
        if kind in _MESSAGES:
            break
        if kind in CHUNK_KINDS:
            begun_us = row["begun_us"] + ROUNDED_US
            beside = tuple(one for one in before if one in until_us and (until_us[one] > begun_us).any())
            before = tuple(one for one in before if one not in beside) or work
            key = _chunk_key(row)
            given = messages.source_of(row)
            received = messages.received(given, row, place, before) if given is not None and given["rank"] != rank else None
            if received is not None:
                yield received
                needs = (*before, received.key)
            else:
                needs = before if given is None or _chunk_key(given) in before else (*before, _chunk_key(given))
            layers = (row["first_layer"], row["n_layers"])
            operation = Operation(kind, micro_batch=row["micro_batch"], layers=layers, **place)
            yield _Node(key, operation, needs, key, begins, ends)
            if (sent := messages.sent(row, place)) is not None:
                yield sent
            work, of_work, before = (key,), needs, (key, *beside)
            until_us[key] = row["ended_us"]
        else:
            if kind == "optimizer" and votes:
                vote: _Key = ("vote", rank)
                yield _Node(vote, Operation("vote", **place), before, ("vote",), ended or begins, begins)
                before = (vote,)
            key = (kind, rank, others)
            group = key if kind == "optimizer" else (kind, _members(row), row["turn"])
            others += 1
            within = following is not None and {kind, following["kind"]} <= set(COLLECTIVE_KINDS)
            within = within and bool(work) and float(np.median(until_us[work[0]] - row["begun_us"])) > ROUNDED_US
            needs = (*of_work, *(one for one in before if one not in work)) if within else before
            yield _Node(key, Operation(kind, turn=row["turn"], **place), needs, group, begins, ends)
            before, until_us[key] = (key, *(work if within else ())), row["ended_us"]
        ended = ends


def _chunk_key(row: _Row) -> _Key:
    return (row["kind"], row["rank"], row["micro_batch"], row["first_layer"])


def _by_channel(rows: list[_Row], kind: str, sender: str, receiver: str) -> dict[_Key, list[_Row]]:
    """(sender, receiver, micro-batch) -> the spans of a kind, in order of time."""
    found: dict[_Key, list[_Row]] = {}
    for row in rows:
        if row["kind"] == kind:
            found.setdefault((row[sender], row[receiver], row["micro_batch"]), []).append(row)
    return found


class _Messages:
    """Who gives whom its input in one iteration, and the messages in between; its rows are in order."""

    def __init__(self, rows: list[_Row], n_layers: int) -> None:
        self._n_layers = n_layers
        chunks = [row for row in rows if row["kind"] in CHUNK_KINDS]
        self._first = {(row["kind"], row["micro_batch"], row["first_layer"]): row for row in chunks}
        self._end = {(row["kind"], row["micro_batch"], row["first_layer"] + row["n_layers"]): row for row in chunks}
        # (kind, micro-batch, first layer of the receiving chunk) -> its chunk, the send, the receive
        self._sides: dict[_Key, tuple[_Row, _Row, _Row]] = {}
        self._by_sender: dict[_Key, _Key] = {}
        # Of a micro-batch's messages from one rank to another the n-th sent is the n-th taken: its path is a chain.
        channels: dict[_Key, list[tuple[_Row, _Row]]] = {}
        for row in chunks:
            given = self.source_of(row)
            if given is not None and given["rank"] != row["rank"]:
                channels.setdefault((given["rank"], row["rank"], row["micro_batch"]), []).append((given, row))
        sends, receives = _by_channel(rows, "send", "rank", "peer"), _by_channel(rows, "recv", "peer", "rank")
        for channel, links in channels.items():
            sent, taken = sends.get(channel, []), receives.get(channel, [])
            if len(sent) == len(taken) == len(links):
                for (given, row), send, receive in zip(links, sent, taken, strict=True):
                    self._sides[_chunk_key(row)] = given, send, receive
                    self._by_sender[_chunk_key(given)] = _chunk_key(row)

    def source_of(self, row: _Row) -> _Row | None:
        """The chunk whose result this one takes; None for the first of a micro-batch."""
        micro_batch, first, end = row["micro_batch"], row["first_layer"], row["first_layer"] + row["n_layers"]
        if row["kind"] == "F":
            return self._end.get(("F", micro_batch, first))
        if row["kind"] == "W":
            return self._first.get(("B", micro_batch, first))
        return self._first.get(("B", micro_batch, end) if end < self._n_layers else ("F", micro_batch, first))

    def received(self, given: _Row, row: _Row, place: Mapping[str, Any], before: tuple[_Key, ...]) -> _Node | None:
        """The receiving side of the message from `given` to `row`; None where the log lacks a side."""
        if _chunk_key(row) not in self._sides:
            return None
        receive = self._sides[_chunk_key(row)][2]
        operation = Operation(f"recv {row['kind']}", peer=given["rank"], **place)
        group = ("message", *_chunk_key(row))
        return _Node(("recv", *_chunk_key(row)), operation, before, group, (receive["row"], BEGIN), (receive["row"], END))

    def sent(self, row: _Row, place: Mapping[str, Any]) -> _Node | None:
        """The sending side of the message with the result of `row`, which ends when the receiver has it."""
        target = self._by_sender.get(_chunk_key(row))
        if target is None:
            return None
        _, send, receive = self._sides[target]
        operation = Operation(f"send {target[0]}", peer=receive["rank"], **place)
        group, began, ended = ("message", *target), (send["row"], BEGIN), (receive["row"], END)
        return _Node(("send", *target), operation, (_chunk_key(row),), group, began, ended)


def _members(row: _Row) -> _Key:
    """Who is in a collective: the group that the source names, or the stage."""
    return ("group", row["group"]) if row["group"] is not None else ("stage", row["stage"])


def _pauses(operations: pl.DataFrame, graph: Graph, start_us: Array, at: Mapping[int, tuple[int, float]]) -> dict[str, Array]:
    """cause -> how much of each operation's launch delay was such a pause: it goes to the operation that began next."""
    ranks = np.array([operation.rank for operation in graph.operations])
    pauses = operations.filter(pl.col("kind").is_in(PAUSES) & pl.col("iteration").is_in(list(at)))
    found: dict[str, Array] = {}
    for (iteration, rank), mine in pauses.group_by("iteration", "rank", maintain_order=True):
        column, begun = at[iteration]
        own = np.flatnonzero(ranks == rank)
        own = own[np.argsort(start_us[own, column], kind="stable")]
        ended = (mine["start_us"] + mine["wall_us"]).to_numpy() - begun - 1
        after = np.searchsorted(start_us[own, column], ended)
        for kind, wall_us, place in zip(mine["kind"], mine["wall_us"], after.tolist(), strict=True):
            if place < len(own):
                found.setdefault(PAUSES[kind], np.zeros_like(start_us))[own[place], column] += wall_us
    return found
