"""The life of a run: its ranks and their processes, checkpoints, and what people asked."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from unskew.collector.events.base import Control, DeviceKind, Mode


class RunStarted(Control, frozen=True, kw_only=True, tag="run_started@1"):
    """`options` are those of `unskew run`; `clock` is monotonic, virtual or imported; `code` hashes the deciding modules.

    `device` is a sentence for people; `device_kind` says what executes: CPU cores, a GPU to each rank, GPUs that ranks share,
    or an emulation; None = nothing that is known. The project's `version` has another name in a line, where `version` is the
    stream's. `resumed_from`: the run that this one goes on with, from its checkpoint after `first_iteration` iterations.
    `policy`: who decides on plans, `detector`: who on slow devices.
    """

    run: str
    device: str
    clock: Literal["monotonic", "virtual", "imported"]
    mode: Mode
    ranks: int
    options: dict[str, Any]
    code: str
    version: str = msgspec.field(name="unskew_version")
    device_kind: DeviceKind | None = None
    resumed_from: str | None = None
    first_iteration: int = 0
    policy: str = "unskew"
    detector: str = "unskew"


class RunFinished(Control, frozen=True, kw_only=True, tag="run_finished@1"):
    """How a run ended; incomplete = it was trained to its end, and its log is not whole.

    `iterations`: those that the log holds; `committed`: those that ranks report to have committed, None = nobody was asked;
    `unwritten`: events that could not be written.
    """

    status: Literal["done", "failed", "stopped", "incomplete"]
    iterations: int
    reason: str = ""
    committed: int | None = None
    unwritten: int = 0


class RankAdded(Control, frozen=True, kw_only=True, tag="rank_added@1"):
    """A process is about to be started for a rank that was lost, or for a new one; `DeviceJoined` follows when it is there.

    `process`: the how manieth of this rank in the run, from 1; `by`: auto, or the name that somebody gave (`user` as in
    `ModeChanged`); `command_id`: of what was asked; `watermark` as in `DeviceLost`.
    """

    rank: int
    process: int
    by: str
    reason: str
    watermark: int
    user: str = ""
    command_id: str = ""


class DeviceJoined(Control, frozen=True, kw_only=True, tag="device_joined@1"):
    """Devices of one `device_class` take the same time for the same work (GPU model, emulated profile); "" = unknown.

    `watermark` as in `DeviceLost`: who joins later than the run began is on standby until a plan has work for it.
    """

    device: str
    rank: int
    node: str
    pid: int
    device_class: str = ""
    watermark: int | None = None


class Suspected(Control, frozen=True, kw_only=True, tag="suspected@1"):
    """A rank hangs and is about to be killed, so that `DeviceLost` follows when its process has ended, or will not end; or it
    is frozen, and the others go on without it."""

    rank: int
    how: Literal["exit", "hung", "frozen"]
    detail: str


class CheckpointSaved(Control, frozen=True, kw_only=True, tag="checkpoint_saved@1"):
    """Every layer with its optimiser state is on disk as it was after `iterations` iterations.

    `seconds`: the longest that a rank's thread wrote, beside training; `paused_us`: the longest that training stood still.
    """

    iterations: int
    bytes: int
    seconds: float
    paused_us: int


class Probed(Control, frozen=True, kw_only=True, tag="probed@1"):
    """What direct measurement of suspects found, before iteration `at_iteration`.

    `slowdowns`: rank -> its matrix product's time over the one when the run began, or, `beside`, over the other ranks' at that
    time; `links`: (sender, receiver, bytes per us); `cost_us`: the longest that a rank was kept from training for it.
    """

    at_iteration: int
    ranks: tuple[int, ...]
    slowdowns: dict[str, float]
    links: tuple[tuple[int, int, float], ...]
    cost_us: int
    beside: bool = False


class StandbyMeasured(Control, frozen=True, kw_only=True, tag="standby_measured@1"):
    """A rank that executes nothing has measured itself: its matrix product's time, and that over the one when the run began
    (None where there is none). `iteration`: the one the others were in when it was asked; `watermark` as in `DeviceLost`."""

    rank: int
    iteration: int
    product_us: int
    slowdown: float | None
    watermark: int


class DeviceLost(Control, frozen=True, kw_only=True, tag="device_lost@1"):
    """`how` is exit (the process ended), hung (no progress, heartbeats go on) or frozen (no heartbeats, process exists).

    `watermark`: iterations that had been judged by then, so that a replay puts the loss where the live run saw it; `iteration`:
    the one that the rank was in; `victims`: who waited for it. `cut_off`: its process is still there: frozen, or waiting in the
    kernel (for a driver or a disk) where SIGKILL does not end it. `DeviceJoined` (it goes on) or `ProcessEnded` follows.
    """

    device: str
    rank: int
    how: Literal["exit", "hung", "frozen"]
    detail: str
    detected_us: int
    watermark: int | None = None
    iteration: int | None = None
    victims: tuple[int, ...] = ()
    cut_off: bool = False


class ProcessEnded(Control, frozen=True, kw_only=True, tag="process_ended@1"):
    """The process of a rank that was lost while it was still there has ended at last; `watermark` as in `DeviceLost`."""

    rank: int
    detail: str
    watermark: int


class Regrouped(Control, frozen=True, kw_only=True, tag="regrouped@1"):
    """All survivors hold working groups again; `seconds` counts from the detection (or the boundary) to the last of them.

    `kept`: the share of `iteration`'s gradients (layer by micro-batch) that the survivors hold and nobody computes again; None
    = no attempt at it had begun.
    """

    plan_version: int = msgspec.field(name="epoch")
    iteration: int
    seconds: float
    migrate_seconds: float
    moved_bytes: int
    kept: float | None = None


class ModeChanged(Control, frozen=True, kw_only=True, tag="mode_changed@1"):
    """`watermark` as in `DeviceLost`; None = by a version that did not ask the Scheduler anew after it.

    Here and in the other answers to a command `by` is the name that somebody gave, and `user` the operating system's.
    """

    mode: Mode
    by: str
    reason: str = ""
    watermark: int | None = None
    user: str = ""


class Note(Control, frozen=True, kw_only=True, tag="note@1"):
    """`proposal`: the one that it is about, "" = none."""

    text: str
    by: str
    proposal: str = ""
    user: str = ""


class CommandRefused(Control, frozen=True, kw_only=True, tag="command_refused@1"):
    command: str
    by: str
    reason: str
    user: str = ""
    command_id: str = ""
