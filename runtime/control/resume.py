"""What a resumed run goes on with: the newest whole checkpoint of a run, and the options that must not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from unskew.collector.events import RunStarted, tag_of
from unskew.collector.files.checkpoints import FORMAT, checkpoints
from unskew.collector.files.tail import decode_event
from unskew.collector.paths import Store
from unskew.collector.read.reader import Reader
from unskew.runtime.control.allowed import LAYOUT_OF_DEGREES
from unskew.runtime.options import OptionsError, ResumePoint, RunOptions

KEPT = ("layers", "dim", "heads", "ends", "tokens", "micro_batches", "seed", "dtype", "corpus", "model", "data")
"""What determines the losses: weights, batches and their order."""


def resumed(store: Store, reader: Reader, run: str, asked: Mapping[str, Any], changed: Collection[str]) -> RunOptions:
    """The options of the run that goes on with `run`: those it had, save what is `changed` to what is asked; no faults.

    Raises `OptionsError` when it cannot be gone on with.
    """
    before = _started(reader, run)
    if before is None:
        raise OptionsError(f"run {run} ended before it began to train: there is nothing to go on with")
    if before.clock == "imported":
        raise OptionsError(f"run {run} was not trained here: only a run of `unskew run` can be resumed")
    held = msgspec.convert(before.options, RunOptions)
    whole = checkpoints(store, run)
    if whole and whole[-1].index.format != FORMAT:
        raise OptionsError(f"the checkpoints of run {run} are of an earlier version of unskew, which can go on with them")
    if whole:
        iterations = whole[-1].index.iterations
        point = ResumePoint(run=run, iterations=iterations, positions=positions_at(reader, run, iterations, held))
    elif held.resume is not None:
        point = held.resume  # it ended before its own first checkpoint
    else:
        raise OptionsError(f"run {run} has no whole checkpoint in {store.checkpoints(run)}")
    for name in changed:
        if name in KEPT and asked[name] != getattr(held, name):
            flag = f"--{name.replace('_', '-')}"
            kept = getattr(held, name)
            raise OptionsError(f"{flag} {asked[name]} is not what {run} was started with: a resumed run keeps {kept}")
    news = {name: asked[name] for name in changed}
    if held.degrees is not None and "degrees" not in news and not news.keys().isdisjoint(LAYOUT_OF_DEGREES):
        if not news.keys() >= {*LAYOUT_OF_DEGREES}:
            raise OptionsError(f"run {run} began with --degrees {held.degrees}, allowed: --degrees, or --tp, --pp and --dp")
        news["degrees"] = None
    options = msgspec.structs.replace(held, **news, faults=(), verify=False, store=str(store.root), resume=point)
    if point.positions and (options.recovery, options.dp) != ("ft-hsdp", held.dp):
        raise OptionsError(
            f"replicas of run {run} were away, so each has its own batches left: it goes on with --recovery ft-hsdp and "
            f"--dp {held.dp}"
        )
    if options.iterations <= point.iterations:
        raise OptionsError(
            f"run {run} has trained {point.iterations} of {options.iterations} iterations: name more with --iterations"
        )
    return options


def positions_at(reader: Reader, run: str, iterations: int, held: RunOptions) -> tuple[int, ...]:
    """How many batches of its stream each replica of a run had trained after so many iterations, by FT-HSDP's rules; () when
    as many as iterations."""
    if held.recovery != "ft-hsdp":
        return ()
    query = """
        select replicas::bigint[] as replicas, states::varchar[] as states from quorums
        semi join (select iteration, max(plan_version) as plan_version from replica_steps
                   where run = ? and committed and iteration < ? group by iteration) using (iteration, plan_version)
        where run = ?"""
    first = held.resume.positions if held.resume is not None else ()
    found = Counter(dict(enumerate(first or (held.first_iteration,) * held.dp)))
    for replicas, states in reader.sql(query, [run, iterations, run]).iter_rows():
        found.update(replica for replica, state in zip(replicas, states, strict=True) if state == "healthy")
    positions = tuple(found[replica] for replica in range(held.dp))
    return () if set(positions) == {iterations} else positions


def losses_before(reader: Reader, point: ResumePoint | None) -> dict[int, float]:
    """The losses of the iterations that a run did not train itself, from the logs of those it goes on with."""
    losses: dict[int, float] = {}
    while point is not None:
        query = "select iteration, loss from iterations where run = ? and iteration < ?"
        losses = {**dict(reader.sql(query, [point.run, point.iterations]).iter_rows()), **losses}
        before = _started(reader, point.run)
        point = msgspec.convert(before.options, RunOptions).resume if before is not None else None
    return losses


def _started(reader: Reader, run: str) -> RunStarted | None:
    query = "select payload::varchar as line from events where run = ? and type = ?"
    for line in reader.sql(query, [run, tag_of(RunStarted)])["line"]:
        event = decode_event(line.encode())
        if isinstance(event, RunStarted):
            return event
    return None
