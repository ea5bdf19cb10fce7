"""What every event has, and the words that several of them share: kinds of work, causes, modes, devices."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

ChunkKind = Literal["F", "B", "W"]
"""Forward, backward, gradient of weights; where a schedule has no W of its own, B is the whole backward pass."""
CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]
SpanKind = Literal[
    ChunkKind,
    "send",
    "recv",
    CollectiveKind,
    "optimizer",
    "data_wait",
    "other",
    "gc",
    "checkpoint",
    "evaluation",
    "probe",
    "regroup",
    "migrate",
]
"""Other: what a loop that is not ours did between the work that is known by a name."""
PAUSES: frozenset[SpanKind] = frozenset({"gc", "checkpoint", "evaluation"})
"""What a loop that is not ours does between its steps, or within another piece of work, of whose time it is no part then."""
CHUNK_KINDS: tuple[ChunkKind, ...] = get_args(ChunkKind)
CHUNK_NAMES: dict[str, str] = {"F": "forward", "B": "backward", "W": "weight gradients"}
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
Cause = Literal[
    "slow_device", "slow_link", "dead", "hung", "long_sequences", "stage_imbalance", "input_bound", "gc_pause", "unknown"
]
OF_DEVICES: tuple[Cause, ...] = ("slow_device", "dead", "hung")
"""Causes that the Scheduler knows of when it looks for a plan: by the speeds of the ranks and by who is left."""
Mode = Literal["observe", "approve", "auto"]
FaultKind = Literal["slow", "slow_link", "kill", "hang", "freeze", "exception", "segfault", "full_disk", "rejoin"]
SlowPart = Literal["compute", "memory"]
DetectorMethod = Literal["unskew", "resihp"]
DeviceKind = Literal["cores", "gpus", "shared_gpus", "sleep", "virtual"]
DEVICE_NAMES: dict[DeviceKind | None, str] = {
    "cores": "real", "gpus": "real", "shared_gpus": "real", "sleep": "sleep", "virtual": "virtual"
}  # fmt: skip
"""What executes a run, in a word. A run that is no training has its own: simulated, imported."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of every event."""


class Telemetry(Event, frozen=True, kw_only=True):
    """Base of the events that may be dropped under pressure."""


class Control(Event, frozen=True, kw_only=True):
    """Base of the events that are never dropped."""


def tag_of(event: type[Event]) -> str:
    """The tag of an event type, such as ``span@1``."""
    return str(event.__struct_config__.tag)
