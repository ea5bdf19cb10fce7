"""Every query of the page, in one place: the log in, a `Snapshot` out.

Results are cached for a second, so that many open tabs cost one set of queries. The dashboard only reads here; what it writes
are commands (dialogs.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Union

import msgspec
import polars as pl
import streamlit as st

from unskew.analytics.workload import Work, work_of
from unskew.collector.commands import controller_alive
from unskew.collector.events import CONTROL, Control, tag_of
from unskew.collector.paths import Store
from unskew.collector.reader import Reader, open_store
from unskew.dashboard.story import Logged, Story, tell

CONTROL_TAGS = [tag_of(kind) for kind in CONTROL]
_DECODER: msgspec.json.Decoder[Control] = msgspec.json.Decoder(Union[CONTROL])  # noqa: UP007 - a union of a tuple of types


class Iteration(msgspec.Struct, frozen=True):
    """A committed iteration; times in microseconds, `loss` in nats per token."""

    iteration: int
    epoch: int
    loss: float
    tokens: int
    measured_us: int
    predicted_us: int | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """What the page shows at one moment; a paused page keeps one.

    `iterations` has the columns of `Iteration`; `judged` has iteration, rank, measured_us, predicted_us, score.
    `age_s` is the wall time since the last event; `controlled` says that a living controller holds the run.
    """

    run: str
    age_s: float
    controlled: bool
    story: Story
    iterations: pl.DataFrame
    judged: pl.DataFrame

    @property
    def latest(self) -> Iteration | None:
        if self.iterations.is_empty():
            return None
        return msgspec.convert(self.iterations.row(-1, named=True), Iteration)


def store() -> Store:
    """The store of this dashboard: $UNSKEW_STORE, else ./data/store."""
    return Store.locate(None)


@st.cache_resource
def _reader(root: str) -> tuple[Reader, threading.Lock]:
    return open_store(root), threading.Lock()


def sql(query: str, params: Sequence[Any] = (), *, refresh: bool = True) -> pl.DataFrame:
    """One query over the views, with all that is in the log by now unless `refresh` is false. Sessions take turns."""
    reader, lock = _reader(str(store().root))
    with lock:
        if refresh:
            reader.refresh()
        return reader.sql(query, params)


@st.cache_data(ttl=1, show_spinner=False)
def runs() -> pl.DataFrame:
    """All runs of the store, newest first."""
    return sql("select * from runs order by started_us desc")


def controlled(run: str) -> bool:
    """Whether a living controller holds the run."""
    return controller_alive(store(), run)


@st.cache_data(ttl=1, show_spinner=False, max_entries=8)
def snapshot(run: str) -> Snapshot:
    """Everything the run page shows of `run`."""
    last = sql("select max(at_us) as at_us from events where run = ?", [run])["at_us"][0]
    return Snapshot(
        run=run,
        age_s=max(0.0, time.time() - last / 1e6) if last is not None else 0.0,
        controlled=controlled(run),
        story=tell(_control(run)),
        iterations=sql(
            "select iteration, epoch, loss, tokens, iteration_us as measured_us, predicted_us from iterations where run = ? "
            "order by iteration",
            [run],
            refresh=False,
        ),
        judged=sql(
            "select iteration, rank, measured_us, predicted_us, score from judged where run = ? order by iteration, rank",
            [run],
            refresh=False,
        ),
    )


def _control(run: str) -> list[Logged]:
    rows = sql(
        "select at_us, actor, payload::varchar as payload from events where run = ? and list_contains(?, type) "
        "order by at_us, stream, version",
        [run, CONTROL_TAGS],
        refresh=False,
    )
    return [Logged(at_us, actor or "", _DECODER.decode(payload)) for at_us, actor, payload in rows.iter_rows()]


@st.cache_data(ttl=1, show_spinner=False, max_entries=8)
def tail(run: str, types: tuple[str, ...], rows: int) -> pl.DataFrame:
    """The newest `rows` events of these types (at_us, type, writer, seq, payload), newest first."""
    return sql(
        "select at_us, type, writer, seq, payload::varchar as payload from events where run = ? and list_contains(?, type) "
        "order by at_us desc, seq desc limit ?",
        [run, list(types), rows],
    )


@st.cache_data(ttl=5, show_spinner=False, max_entries=32)
def chunks(run: str, iteration: int) -> pl.DataFrame:
    """The chunks of the attempt that counted: rank, kind, micro_batch, start_ms (from the first chunk on), ms."""
    return sql(
        "select rank, kind, micro_batch, (start_us - min(start_us) over ()) / 1e3 as start_ms, wall_us / 1e3 as ms "
        "from chunks semi join iterations using (run, iteration, epoch, attempt) where run = ? and iteration = ? "
        "order by start_us",
        [run, iteration],
    )


@st.cache_data(ttl=5, show_spinner=False, max_entries=32)
def works(run: str, iteration: int) -> list[Work]:
    """The work of each micro-batch of an iteration, in the order of micro-batches."""
    rows = sql(
        "select micro_batch, lengths from micro_batches semi join iterations using (run, iteration, attempt) "
        "where run = ? and iteration = ? order by micro_batch",
        [run, iteration],
    )
    return [work_of(lengths) for lengths in rows["lengths"].to_list()]
