"""Spans of one of our own runs under one plan -> what waited for what, and when it ran.

A chunk needs the chunk before it on its rank and its input: forwards along the layers, backwards against them. Where the input
comes from another rank a message lies between: from the moment it was posted until the receiver had it (where the receiver
came later than the message, at most until it came; the median of the measured messages counts). Behind a rank's last chunk its
gradient collectives in order, each a group of its members; then the vote, a group of all; then the optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import polars as pl

from unskew.analytics.diagnosis.graph import Array, Graph, GraphError, Operation
from unskew.analytics.diagnosis.replay import Recording
from unskew.analytics.plan import Plan

CHUNKS = ("F", "B", "W")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
PAUSES = {"gc": "gc_pause", "data_wait": "input_bound"}
"""Kinds of spans in which a rank could have worked -> the cause that they are evidence of."""

_Row = dict[str, Any]
_Key = tuple[Any, ...]


class Recorded(msgspec.Struct, frozen=True):
    """A recording, the layers of each chunk ((first, number), None for other operations), and pauses (see `Section`)."""

    recording: Recording
    layers: tuple[tuple[int, int] | None, ...]
    pauses_us: dict[str, Array]


class _Node(msgspec.Struct, frozen=True):
    """An operation of one iteration, with its times (us)."""

    key: _Key
    operation: Operation
    needs: tuple[_Key, ...]
    group: _Key
    start_us: float
    wall_us: float
    layers: tuple[int, int] | None = None


def read_spans(spans: pl.DataFrame, commits: pl.DataFrame, plan: Plan) -> Recorded:
    """The recording of the committed iterations that `commits` names (iteration, rank, start_us, wall_us), all under `plan`.

    `spans` are theirs, of the attempt that counted. Iterations that lack an operation are left out. Raises `GraphError`.
    """
    begun = {i: us for i, us in commits.group_by("iteration").agg(pl.col("start_us").min()).iter_rows()}
    took = {i: us for i, us in commits.group_by("iteration").agg(pl.col("wall_us").max()).iter_rows()}
    nodes = {
        int(iteration): _nodes(rows.to_dicts(), plan)
        for (iteration,), rows in spans.filter(pl.col("iteration").is_in(list(begun))).group_by(
            "iteration", maintain_order=True
        )
    }
    if not nodes:
        raise GraphError(f"no iteration under plan {plan.epoch} has its chunks in the log")
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
    for kind in ("message F", "message B"):
        mine = graph.where(kind=kind)
        known = wall[mine & ~np.isnan(wall).all(axis=1)]
        usual = float(np.nanmedian(known)) if known.size and not np.isnan(known).all() else 0.0
        wall[mine] = np.where(np.isnan(wall[mine]), usual, wall[mine])
    recording = Recording(
        graph=graph,
        iterations=tuple(iterations),
        start_us=start,
        wall_us=wall,
        iteration_us=np.array([float(took[i]) for i in iterations]),
        waits=frozenset({"message F", "message B", *COLLECTIVES, "vote"}),
        left_out=tuple(sorted(set(begun) - set(iterations))),
    )
    pauses = _pauses(spans, recording, begun)
    return Recorded(recording, tuple(template[key].layers for key in keys), pauses)


def _nodes(rows: list[_Row], plan: Plan) -> dict[_Key, _Node]:
    """All operations of one iteration, rank by rank in order of time."""
    by_rank: dict[int, list[_Row]] = {}
    for row in sorted(rows, key=lambda row: (row["rank"], row["start_us"])):
        by_rank.setdefault(row["rank"], []).append(row)
    chunk_at: dict[tuple[str, int, int], _Row] = {}
    for row in rows:
        if row["kind"] in CHUNKS:
            edge = row["first_layer"] if row["kind"] == "F" else row["first_layer"] + row["n_layers"]
            chunk_at[row["kind"] + ("-end" if row["kind"] == "F" else "-first"), row["micro_batch"], _exit(row)] = row
            chunk_at[row["kind"], row["micro_batch"], edge] = row
    sends = {(row["rank"], row["peer"], row["micro_batch"]): row for row in rows if row["kind"] == "send"}
    receives: dict[tuple[int, int, int, int], _Row] = {
        (row["rank"], row["peer"], row["micro_batch"], row["first_layer"]): row for row in rows if row["kind"] == "recv"
    }
    nodes: dict[_Key, _Node] = {}
    for rank, mine in by_rank.items():
        role = plan.role_of.get(rank)
        if role is None:
            continue
        place = {"rank": rank, "replica": role.replica, "stage": role.stage}
        before: _Key | None = None
        collectives = 0
        ended_us = 0.0
        for row in mine:
            kind = row["kind"]
            needs = (before,) if before else ()
            if kind in CHUNKS:
                key: _Key = (kind, rank, row["micro_batch"], row["first_layer"])
                source = _source(row, chunk_at, plan.n_layers)
                if source is not None:
                    given = (source["kind"], source["rank"], source["micro_batch"], source["first_layer"])
                    if source["rank"] != rank:
                        message = _message(row, source, sends, receives, place)
                        if message is not None:
                            nodes[message.key] = message
                            given = message.key
                    needs += (given,) if given != before else ()
                operation = Operation(kind, micro_batch=row["micro_batch"], **place)
                layers = (row["first_layer"], row["n_layers"])
                nodes[key] = _Node(key, operation, needs, key, row["start_us"], row["wall_us"], layers)
            elif kind in COLLECTIVES:
                key, group = (kind, rank, collectives), (kind, row["group"], _turn(mine, row))
                collectives += 1
                nodes[key] = _Node(key, Operation(kind, **place), needs, group, row["start_us"], row["wall_us"])
            elif kind == "optimizer":
                vote: _Key = ("vote", rank)
                nodes[vote] = _Node(
                    vote, Operation("vote", **place), needs, ("vote",), ended_us, max(row["start_us"] - ended_us, 0.0)
                )
                key = (kind, rank)
                nodes[key] = _Node(key, Operation(kind, **place), (vote,), key, row["start_us"], row["wall_us"])
            else:
                continue
            before, ended_us = key, float(row["start_us"] + row["wall_us"])
    return nodes


def _exit(row: _Row) -> int:
    """The layer at which a chunk's result leaves it."""
    return int(row["first_layer"] + row["n_layers"] if row["kind"] == "F" else row["first_layer"])


def _source(row: _Row, chunk_at: Mapping[tuple[str, int, int], _Row], n_layers: int) -> _Row | None:
    """The chunk whose result this one takes; None for the first of a micro-batch."""
    micro_batch, end = row["micro_batch"], row["first_layer"] + row["n_layers"]
    if row["kind"] == "F":
        return chunk_at.get(("F-end", micro_batch, row["first_layer"])) if row["first_layer"] else None
    if row["kind"] == "W":
        return chunk_at.get(("B", micro_batch, end))
    return (
        chunk_at.get(("B-first", micro_batch, end)) if end < n_layers else chunk_at.get(("F", micro_batch, row["first_layer"]))
    )


def _message(
    row: _Row,
    source: _Row,
    sends: Mapping[tuple[int, int, int], _Row],
    receives: Mapping[tuple[int, int, int, int], _Row],
    place: Mapping[str, int],
) -> _Node | None:
    """The message between two chunks; its time is NaN where the receiver came later than it."""
    sent = sends.get((source["rank"], row["rank"], row["micro_batch"]))
    taken = receives.get((row["rank"], source["rank"], row["micro_batch"], row["first_layer"]))
    if sent is None or taken is None:
        return None
    key: _Key = (f"message {row['kind']}", row["rank"], row["micro_batch"], row["first_layer"])
    given = (source["kind"], source["rank"], source["micro_batch"], source["first_layer"])
    arrived_us = taken["start_us"] + taken["wall_us"]
    wall_us = float(arrived_us - sent["start_us"]) if taken["wall_us"] > 0 else float("nan")
    operation = Operation(f"message {row['kind']}", peer=source["rank"], **place)
    return _Node(key, operation, (given,), key, sent["start_us"], wall_us)


def _turn(mine: Iterable[_Row], row: _Row) -> int:
    """How many collectives of this rank and group came before this one."""
    return sum(r["kind"] == row["kind"] and r["group"] == row["group"] and r["start_us"] < row["start_us"] for r in mine)


def _pauses(spans: pl.DataFrame, recording: Recording, begun: Mapping[int, float]) -> dict[str, Array]:
    """cause -> how much of each operation's launch delay was such a pause: it goes to the operation that began next."""
    at = {iteration: i for i, iteration in enumerate(recording.iterations)}
    ranks = np.array([operation.rank for operation in recording.graph.operations])
    found: dict[str, Array] = {}
    for row in spans.filter(pl.col("kind").is_in(list(PAUSES)) & pl.col("iteration").is_in(list(at))).iter_rows(named=True):
        column = at[row["iteration"]]
        end = row["start_us"] + row["wall_us"] - begun[row["iteration"]]
        after = np.flatnonzero((ranks == row["rank"]) & (recording.start_us[:, column] >= end - 1))
        if after.size:
            us = found.setdefault(PAUSES[row["kind"]], np.zeros_like(recording.wall_us))
            us[after[np.argmin(recording.start_us[after, column])], column] += row["wall_us"]
    return found
