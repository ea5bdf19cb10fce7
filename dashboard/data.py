"""Every query of the page, in one place: the log in, a `Snapshot` out.

Results are cached for a second, so that many open tabs cost one set of queries. The dashboard only reads here; what it writes
are commands (dialogs.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Union

import msgspec
import polars as pl
import streamlit as st

from unskew.analytics.core.outcome import Outcome, outcome_of_run
from unskew.analytics.core.run_state import LoggedControl, RunState, fold
from unskew.analytics.core.workload import Work, work_of
from unskew.collector.alerts.acceptance import waits
from unskew.collector.events import CONTROL, Control, Event, tag_of
from unskew.collector.files.tail import decode_event
from unskew.collector.paths import Store
from unskew.collector.read.reader import Reader, open_store
from unskew.collector.service.process import trouble
from unskew.collector.write.commands import controller_alive

RECENT = 50
"""Iterations whose judgements a snapshot holds."""
CONTROL_TAGS = [tag_of(kind) for kind in CONTROL]
_DECODER: msgspec.json.Decoder[Control] = msgspec.json.Decoder(Union[CONTROL])  # noqa: UP007 - a union of a tuple of types


class IterationRow(msgspec.Struct, frozen=True):
    """A committed iteration; times in microseconds, `loss` in nats per token. An imported run has what its source measured."""

    iteration: int
    plan_version: int
    loss: float | None
    tokens: int | None
    measured_us: int | None
    predicted_us: int | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """What the page shows at one moment; a paused page keeps one.

    `log`: the control events; `state`: what they add up to. `iterations` has the columns of `IterationRow`; `judged` has
    iteration, rank, measured_us, healthy_us of the last ones. `problems`: what the collector found wrong in this log.
    `age_s` is the wall time since the last event, of a run that is over since its end; `controlled`: a living
    controller holds the run.
    """

    run: str
    age_s: float
    controlled: bool
    log: tuple[LoggedControl, ...]
    state: RunState
    iterations: pl.DataFrame
    judged: pl.DataFrame
    problems: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it: it has ended, or lost its controller."""
        return self.state.finished is not None or not self.controlled

    @property
    def outcome(self) -> Outcome:
        """Wrong, well down to a stated slowdown, or why it cannot be judged."""
        return outcome_of_run(self.state, controlled=self.controlled)

    @property
    def latest(self) -> IterationRow | None:
        if self.iterations.is_empty():
            return None
        return msgspec.convert(self.iterations.row(-1, named=True), IterationRow)


def store() -> Store:
    """The store of this dashboard: $UNSKEW_STORE, else ./data/store."""
    return Store.locate(None)


@st.cache_resource
def _reader(root: str) -> tuple[Reader, threading.Lock]:
    return open_store(root), threading.Lock()


def sql(query: str, params: Sequence[Any] | Mapping[str, Any] = (), *, refresh: bool = True) -> pl.DataFrame:
    """One query over the views, with all that is in the log by now unless `refresh` is false. Sessions take turns."""
    reader, lock = _reader(str(store().root))
    with lock:
        if refresh:
            reader.refresh()
        return reader.sql(query, params)


@st.cache_data(ttl=1, show_spinner=False)
def runs() -> pl.DataFrame:
    """All runs of the store, newest first, each with its outcome."""
    return sql("select * from runs left join outcomes using (run) order by started_us desc")


def controlled(run: str) -> bool:
    """Whether a living controller holds the run."""
    return controller_alive(store(), run)


@st.cache_data(ttl=1, show_spinner=False, max_entries=8)
def snapshot(run: str) -> Snapshot:
    """Everything the run page shows of `run`."""
    last_us, n_dropped = sql(
        "select coalesce((select max(finished_us) from runs where run = $1), max(last_us)), coalesce(sum(n_dropped), 0) "
        "from writers where run = $1",
        [run],
    ).row(0)
    return Snapshot(
        run=run,
        age_s=max(0.0, time.time() - last_us / 1e6) if last_us is not None else 0.0,
        problems=tuple(problem for problem in problems() if problem.startswith((f"run {run}: ", "the collector"))),
        controlled=controlled(run),
        log=_control(run),
        state=state(run, dropped=n_dropped > 0),
        iterations=sql(
            "select iteration, plan_version, loss, tokens, iteration_us as measured_us, predicted_us from iterations "
            "where run = ? order by iteration",
            [run],
            refresh=False,
        ),
        judged=sql(
            "select iteration, rank, measured_us, healthy_us from judged where run = ? and iteration > "
            "(select max(iteration) - ? from iterations where run = ?) order by iteration, rank",
            [run, RECENT, run],
            refresh=False,
        ),
    )


_AXIS = """
    axis as (
        select *, min(iteration) over (partition by x) as named
        from (select iteration, iteration_us, (row_number() over (order by iteration) - 1) // $grain as x
              from iterations where run = $run and iteration between $first and $last))"""
_CELLS = """
    select x, named as iteration, rank, sum(measured_us)::bigint as measured_us, sum(reference_us)::bigint as reference_us,
        sum(iteration_us)::bigint as iteration_us
    from measured join axis using (iteration) group by x, named, rank order by x, rank"""
_JUDGED = f"""
    with {_AXIS}, measured as (
        select iteration, rank, measured_us, healthy_us as reference_us from judged
        where run = $run and iteration between $first and $last and healthy_us > 0)
    {_CELLS}"""
_CHUNKS = """
    select iteration, rank, sum(compute_us) as measured_us from chunks
    where run = $run and iteration between $first and $last group by all having measured_us is not null"""
_TIMED = """
    select iteration, rank, (payload->>'wall_us')::bigint as measured_us from events
    where run = $run and iteration between $first and $last and type like 'iteration_timed@%' and rank is not null
    qualify row_number() over (partition by iteration, rank order by coalesce((payload->>'attempt')::int, 0) desc) = 1"""
_BESIDE_PEERS = """
    with {axis}, spent as ({spent}),
    measured as (select *, median(measured_us) over (partition by iteration) as reference_us from spent)
    {cells}"""


@st.cache_data(ttl=1, show_spinner=False, max_entries=16)
def judged(run: str, first: int, last: int, grain: int) -> pl.DataFrame:
    """Of the iterations `first` to `last` that are in the log, `grain` taken together: x (their position), iteration (the first
    of them), rank, and the sums measured_us, reference_us (of a healthy device; both chunk time) and iteration_us."""
    return sql(_JUDGED, {"run": run, "first": first, "last": last, "grain": grain}, refresh=False)


@st.cache_data(ttl=60, show_spinner=False, max_entries=16)
def beside_peers(run: str, first: int, last: int, grain: int) -> tuple[str, pl.DataFrame]:
    """Of an imported run, which nobody judged: what was timed ("compute", "iteration", "" = nothing per rank), and the columns
    of `judged`, with the median of the ranks as reference."""
    for what, spent in (("compute", _CHUNKS), ("iteration", _TIMED)):
        query = _BESIDE_PEERS.format(axis=_AXIS, spent=spent, cells=_CELLS)
        found = sql(query, {"run": run, "first": first, "last": last, "grain": grain}, refresh=False)
        if not found.is_empty():
            return what, found
    return "", found


@st.cache_data(ttl=5, show_spinner=False, max_entries=16)
def skew(run: str, first: int, last: int) -> pl.DataFrame:
    """The rows of the view `skew` of these iterations."""
    return sql("select * from skew where run = ? and iteration between ? and ?", [run, first, last], refresh=False)


@st.cache_data(ttl=1, show_spinner=False)
def problems() -> tuple[str, ...]:
    """What keeps the collector from going on, that alerts are not in force, and what is wrong in the log, one sentence each."""
    reader, lock = _reader(str(store().root))
    now = trouble(store())
    with lock:
        return tuple(filter(None, (now and f"the collector cannot go on: {now}", waits(store())))) + reader.problems


@st.cache_data(ttl=5, show_spinner=False)
def history() -> pl.DataFrame:
    """Devices that were lost or flagged in any run of the store, those affected most often first."""
    return sql("select * from device_history where n_runs_affected > 0 order by n_runs_affected desc, last_trouble_us desc")


def state(run: str, *, dropped: bool) -> RunState:
    """What the run's control events add up to; `dropped`: whether its log lacks events, which are then counted by type."""
    whole = reduce(lambda state, entry: fold(state, entry.event, entry.at_us), _control(run), RunState())
    return reduce(fold, _dropped(run) if dropped else (), whole)


def _dropped(run: str) -> list[Event]:
    """What its writers had to drop."""
    rows = sql(
        "select payload::varchar as line from events where run = ? and type like 'dropped@%' order by writer, seq",
        [run],
        refresh=False,
    )
    return [event for line in rows["line"] if (event := decode_event(line.encode())) is not None]


@st.cache_data(ttl=1, show_spinner=False, max_entries=8)
def _control(run: str) -> tuple[LoggedControl, ...]:
    """The control events by wall clock, those of a stream in its own order though the clock be set back meanwhile."""
    rows = sql(
        "select at_us, actor, payload from projected.control where run = ? and list_contains(?, type) "
        "order by max(at_us) over (partition by stream order by version), stream, version",
        [run, CONTROL_TAGS],
        refresh=False,
    )
    return tuple(LoggedControl(at_us, _DECODER.decode(payload), actor or "") for at_us, actor, payload in rows.iter_rows())


@st.cache_data(ttl=1, show_spinner=False, max_entries=8)
def tail(run: str, types: tuple[str, ...], rows: int) -> pl.DataFrame:
    """The newest `rows` events of these types (at_us, type, writer, seq, payload), newest first."""
    reader, lock = _reader(str(store().root))
    with lock:
        reader.refresh()
        return reader.newest(rows, run, types).select("at_us", "type", "writer", "seq", "payload")


@st.cache_data(ttl=5, show_spinner=False, max_entries=32)
def chunks(run: str, iteration: int) -> pl.DataFrame:
    """The chunks of the attempt that counted: rank, kind, micro_batch, start_ms (from the first chunk on), ms."""
    return sql(
        "select rank, kind, micro_batch, (start_us - min(start_us) over ()) / 1e3 as start_ms, wall_us / 1e3 as ms "
        "from chunks semi join iterations using (run, iteration, plan_version, attempt) where run = ? and iteration = ? "
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
