"""A new controller takes over living ranks: what the log of the one before tells, and what of it is news."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from unskew.analytics.loop.controller_state import ControllerState
from unskew.analytics.loop.intake import Intake
from unskew.analytics.replay.causes import causes_so_far
from unskew.analytics.replay.recorded_run import run_of_lines
from unskew.analytics.replay.rehearsal import ControllerRehearsal
from unskew.collector.events import (
    CheckpointSaved,
    Control,
    DeviceJoined,
    DeviceLost,
    FaultInjected,
    PlanIssued,
    ProcessEnded,
    RunStarted,
    StandbyMeasured,
)
from unskew.collector.files.tail import Entry, decode_event
from unskew.collector.paths import Store
from unskew.collector.read.reader import Reader
from unskew.runtime.node.waiting import folder_of_agent
from unskew.runtime.options import OptionsError, RunOptions
from unskew.runtime.protocol import AnyMessage, CheckpointPart, FaultAnnounced, RankExited, RankForked, StandbyProduct


class Takeover(msgspec.Struct, frozen=True):
    """What a controller goes on with: all that was logged, `control` of it by itself, the state that it adds up to, and the
    intake with the iterations that nobody has judged."""

    entries: Sequence[Entry]
    control: Sequence[Control]
    state: ControllerState
    intake: Intake

    @property
    def cut_off(self) -> list[DeviceLost]:
        """The losses of ranks whose processes may still be there."""
        newest = {event.rank: event for event in self.control if isinstance(event, DeviceLost)}
        return [newest[rank] for rank in sorted(self.state.rejoining.cut_off)]

    @property
    def newest_abort(self) -> int:
        """The highest plan version that took effect at once."""
        return max(event.plan_version for event in self.control if isinstance(event, PlanIssued) and not event.optional)


def living(store: Store, reader: Reader, run: str) -> RunOptions | None:
    """The options of a run whose ranks wait for a controller; None when they do not. Raises `OptionsError`."""
    if folder_of_agent(store, run) is None:
        return None
    query = "select payload::varchar as line from events where run = ? and stream is not null order by seq limit 1"
    started = [decode_event(line.encode()) for line in reader.sql(query, [run])["line"]]
    if not started or not isinstance(started[0], RunStarted):
        raise OptionsError(f"run {run} has ranks that wait for a controller, but its log does not say how it was started")
    return msgspec.convert(started[0].options, RunOptions)


def folder_of(store: Store, run: str) -> Path:
    """Where the agent has its sockets. Raises `OptionsError` when it is gone."""
    folder = folder_of_agent(store, run)
    if folder is None:
        raise OptionsError(f"the ranks of run {run} are gone: resume it from its checkpoint")
    return folder


def taken_over(reader: Reader, run: str) -> Takeover:
    """From the log. Raises `ReplayError` when that does not tell."""
    query = "select writer, seq, at_us, stream, version, actor, payload::varchar as line from events where run = ?"
    rows = [(*rest, line.encode()) for *rest, line in reader.sql(query, [run]).iter_rows()]
    recorded = run_of_lines(run, ((*row[:4], row[6]) for row in rows))
    rehearsal = ControllerRehearsal(*causes_so_far(recorded))
    rehearsal.run()
    intake = Intake(rehearsal.state.committed)
    intake.take(recorded.telemetry, {})
    entries = [
        Entry(writer, 0, seq, at_us, stream, version, actor, decode_event(line), line)
        for writer, seq, at_us, stream, version, actor, line in rows
    ]
    control = [entry.event for entry in entries if isinstance(entry.event, Control)]
    return Takeover(entries, control, rehearsal.state, intake)


def is_logged(message: AnyMessage, control: Sequence[Control]) -> bool:
    """Whether the controller before had logged what an agent reports again."""
    match message:
        case RankForked():
            return _since_it_joined(message, control) is not None
        case RankExited():
            since = _since_it_joined(message, control)
            own = [e for e in since or () if isinstance(e, DeviceLost | ProcessEnded) and e.rank == message.rank]
            return bool(own) and not (isinstance(own[-1], DeviceLost) and own[-1].cut_off)
        case FaultAnnounced():
            fault = message.fault
            same = (fault.kind, fault.rank, fault.peer, fault.at_iteration)
            return any(isinstance(e, FaultInjected) and (e.kind, e.rank, e.peer, e.at_iteration) == same for e in control)
        case CheckpointPart():
            return any(isinstance(event, CheckpointSaved) and event.iterations == message.iterations for event in control)
        case StandbyProduct():
            asked = (message.rank, message.iteration)
            return any(isinstance(event, StandbyMeasured) and (event.rank, event.iteration) == asked for event in control)
    return False


def _since_it_joined(message: RankForked | RankExited, control: Sequence[Control]) -> Sequence[Control] | None:
    """What was logged since the process joined that is spoken of; None when it has not."""
    for at, event in enumerate(control):
        if isinstance(event, DeviceJoined) and (event.rank, event.pid) == (message.rank, message.pid):
            return control[at:]
    return None
