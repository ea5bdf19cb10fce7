"""A trace of ranks that do one thing after the other, under one plan -> what waited for what, and when it ran.

Our own runs are such, and foreign traces are taken to be. A chunk needs the chunk before it on its rank and its input: forwards
along the layers, backwards against them. Where the input comes from another rank a message lies between, a group of its send
and its receive: it runs once the sender has posted it and the receiver waits for it. A collective needs what its rank did
before, and is a group of its members (where the source does not name the group: of the ranks of its stage). So does the
optimiser, in our own runs behind a vote, which is a group of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


class _Node(msgspec.Struct, frozen=True):
    """An operation of one iteration, with its times (us)."""

    key: _Key
    operation: Operation
    needs: tuple[_Key, ...]
    group: _Key
    start_us: float
    wall_us: float


def record(trace: Trace) -> TraceRecording:
    """The recording of the trace's iterations. Those that lack an operation are left out. Raises `GraphError`."""
    _check(trace)
    extents = {iteration: (begin, end) for _, iteration, begin, end in trace.iterations.iter_rows()}
    begun = {iteration: begin for iteration, (begin, _) in extents.items()}
    operations = trace.operations.filter(pl.col("stage").is_not_null() & pl.col("iteration").is_in(list(begun)))
    chunks = operations.filter(pl.col("kind").is_in(CHUNK_KINDS))
    n_layers = int(chunks.select((pl.col("first_layer") + pl.col("n_layers")).max()).item() or 0)
    nodes = {
        int(iteration): _nodes(rows.to_dicts(), n_layers, votes=trace.votes)
        for (iteration,), rows in operations.group_by("iteration", maintain_order=True)
    }
    if not nodes or not chunks.height:
        version = trace.iterations["plan_version"].to_list()[0]
        raise GraphError(f"no iteration under plan {version} has its chunks in the log")
    shapes: dict[tuple[_Key, ...], list[int]] = {}
    for iteration in sorted(nodes):
        shapes.setdefault(tuple(nodes[iteration]), []).append(iteration)
    keys, iterations = max(shapes.items(), key=lambda item: (len(item[1]), len(item[0])))
    template = nodes[iterations[0]]
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
    start = np.array([[nodes[i][key].start_us - begun[i] for i in iterations] for key in keys], dtype=float)
    wall = np.array([[nodes[i][key].wall_us for i in iterations] for key in keys], dtype=float)
    return TraceRecording(
        graph=graph,
        iterations=tuple(iterations),
        start_us=start,
        wall_us=wall,
        iteration_us=np.array([extents[i][1] - extents[i][0] for i in iterations]),
        waits=frozenset({f"{side} {kind}" for side in ("send", "recv") for kind in "FB"} | {*COLLECTIVE_KINDS, "vote"}),
        left_out=tuple(sorted(set(begun) - set(iterations))),
        pauses_us=_pauses(operations, graph, start, {i: (column, begun[i]) for column, i in enumerate(iterations)}),
    )


def _check(trace: Trace) -> None:
    """Raise `GraphError` where the operations do not show what waits for what."""
    chunks = trace.operations.filter(pl.col("kind").is_in(CHUNK_KINDS) & pl.col("stage").is_not_null())
    if chunks["first_layer"].n_unique() > 1 and chunks["stage"].n_unique() == 1:
        raise GraphError("the trace has several stages and no messages between them, so nobody knows what waits for what")
    if chunks.select(pl.struct("iteration", "kind", "rank", "micro_batch", "first_layer").is_duplicated().any()).item():
        raise GraphError("a rank has a micro-batch more than once in an iteration, and its layers are not recorded")


def _nodes(rows: list[_Row], n_layers: int, *, votes: bool) -> dict[_Key, _Node]:
    """All operations of one iteration, rank by rank in order of time."""
    messages = _Messages(rows, n_layers)
    of_rank: dict[int, list[_Row]] = {}
    for row in sorted(rows, key=_start_us):
        of_rank.setdefault(row["rank"], []).append(row)
    nodes = (node for _, mine in sorted(of_rank.items()) for node in _of_rank(mine, messages, votes=votes))
    return {node.key: node for node in nodes}


def _of_rank(mine: list[_Row], messages: _Messages, *, votes: bool) -> Iterator[_Node]:
    """One rank's operations in order of time, each with the messages that it took."""
    before: tuple[_Key, ...] = ()
    place = {name: mine[0][name] for name in ("rank", "replica", "stage")}
    rank, ended_us, others = place["rank"], 0.0, 0
    for row in mine:
        kind = row["kind"]
        if kind in CHUNK_KINDS:
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
            yield _Node(key, operation, needs, key, row["start_us"], row["wall_us"])
            if (sent := messages.sent(row, place)) is not None:
                yield sent
        elif kind in COLLECTIVE_KINDS:
            key, group = (kind, rank, others), (kind, _members(row), _turn(mine, row))
            others += 1
            yield _Node(key, Operation(kind, **place), before, group, row["start_us"], row["wall_us"])
        elif kind == "optimizer":
            if votes:
                vote: _Key = ("vote", rank)
                yield _Node(vote, Operation("vote", **place), before, ("vote",), ended_us, max(row["start_us"] - ended_us, 0.0))
                before = (vote,)
            key = (kind, rank, others)
            others += 1
            yield _Node(key, Operation(kind, **place), before, key, row["start_us"], row["wall_us"])
        else:
            continue
        before, ended_us = (key,), float(row["start_us"] + row["wall_us"])


def _chunk_key(row: _Row) -> _Key:
    return (row["kind"], row["rank"], row["micro_batch"], row["first_layer"])


def _start_us(row: _Row) -> float:
    return float(row["start_us"])


def _by_channel(rows: list[_Row], kind: str, sender: str, receiver: str) -> dict[_Key, list[_Row]]:
    """(sender, receiver, micro-batch) -> the spans of a kind, in order of time."""
    found: dict[_Key, list[_Row]] = {}
    for row in sorted((row for row in rows if row["kind"] == kind), key=_start_us):
        found.setdefault((row[sender], row[receiver], row["micro_batch"]), []).append(row)
    return found


class _Messages:
    """Who gives whom its input in one iteration, and the messages in between."""

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
        for row in sorted(chunks, key=_start_us):
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
        return _Node(("recv", *_chunk_key(row)), operation, before, group, receive["start_us"], receive["wall_us"])

    def sent(self, row: _Row, place: Mapping[str, Any]) -> _Node | None:
        """The sending side of the message with the result of `row`, which ends when the receiver has it."""
        target = self._by_sender.get(_chunk_key(row))
        if target is None:
            return None
        _, send, receive = self._sides[target]
        wall_us = max(float(receive["start_us"] + receive["wall_us"] - send["start_us"]), 0.0)
        operation = Operation(f"send {target[0]}", peer=receive["rank"], **place)
        return _Node(("send", *target), operation, (_chunk_key(row),), ("message", *target), send["start_us"], wall_us)


def _members(row: _Row) -> _Key:
    """Who is in a collective: the group that the source names, or the stage."""
    return ("group", row["group"]) if row["group"] is not None else ("stage", row["stage"])


def _turn(mine: Iterable[_Row], row: _Row) -> int:
    """How many collectives of this rank and group came before this one."""
    return sum(r["kind"] == row["kind"] and r["group"] == row["group"] and r["start_us"] < row["start_us"] for r in mine)


def _pauses(operations: pl.DataFrame, graph: Graph, start_us: Array, at: Mapping[int, tuple[int, float]]) -> dict[str, Array]:
    """cause -> how much of each operation's launch delay was such a pause: it goes to the operation that began next."""
    ranks = np.array([operation.rank for operation in graph.operations])
    found: dict[str, Array] = {}
    for row in operations.filter(pl.col("kind").is_in(PAUSES) & pl.col("iteration").is_in(list(at))).iter_rows(named=True):
        column, begun = at[row["iteration"]]
        end = row["start_us"] + row["wall_us"] - begun
        after = np.flatnonzero((ranks == row["rank"]) & (start_us[:, column] >= end - 1))
        if after.size:
            us = found.setdefault(PAUSES[row["kind"]], np.zeros_like(start_us))
            us[after[np.argmin(start_us[after, column])], column] += row["wall_us"]
    return found
