"""Where ranks beat and the agent looks: memory that they share, a record per rank.

Nothing is sent, so nothing is lost when the agent is late, and each heartbeat carries its own time: the monotonic clock is the
same in all processes of a node. The memory has no name (memfd): it is inherited, and gone with its processes. A file on a disk
would now and then stop who writes to it, while the kernel saves the page.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import get_args

import msgspec

from unskew.analytics.health.liveness import Activity
from unskew.runtime.options import MOST_RANKS

BEAT_S = 0.05

_ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
_RECORD = struct.Struct("=IIQIbhfddQ")
_CHECK = struct.Struct("=I")
_ROOM = 64
_TRIES = 3


class Beat(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A heartbeat: the process, the kernel's id of the thread that beats, and what the main thread is at (rank/progress.py).

    `at_s` is the monotonic clock, `moved_s` when the beating thread saw `count` move. `peak_bytes`: the most memory so far, of
    the process, or of its GPU in tensors.
    """

    pid: int
    thread: int
    count: int
    iteration: int
    activity: Activity
    waits_for: int | None = None
    promised_s: float = 0.0
    at_s: float
    moved_s: float
    peak_bytes: int = 0


class HeartbeatPage:
    """The shared memory behind a file descriptor, which the page takes over."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, MOST_RANKS * _ROOM)
        os.close(descriptor)

    def write(self, rank: int, beat: Beat) -> None:
        """The rank's last heartbeat."""
        onto = -1 if beat.waits_for is None else beat.waits_for
        data = _RECORD.pack(
            beat.pid, beat.thread, beat.count, beat.iteration, _ACTIVITIES.index(beat.activity), onto, beat.promised_s,
            beat.at_s, beat.moved_s, beat.peak_bytes,
        )  # fmt: skip
        self._memory[rank * _ROOM : rank * _ROOM + _RECORD.size + _CHECK.size] = data + _CHECK.pack(zlib.crc32(data))

    def read(self, rank: int) -> Beat | None:
        """The rank's last heartbeat; None before the first, and while it is being written."""
        for _ in range(_TRIES):
            record = self._memory[rank * _ROOM : rank * _ROOM + _RECORD.size + _CHECK.size]
            data, check = record[: _RECORD.size], record[_RECORD.size :]
            if _CHECK.unpack(check)[0] != zlib.crc32(data):
                continue
            pid, thread, count, iteration, activity, onto, promised_s, at_s, moved_s, peak = _RECORD.unpack(data)
            return Beat(
                pid=pid, thread=thread, count=count, iteration=iteration, activity=_ACTIVITIES[activity],
                waits_for=None if onto < 0 else onto, promised_s=promised_s, at_s=at_s, moved_s=moved_s,
                peak_bytes=peak,
            )  # fmt: skip
        return None


def shared_memory() -> int:
    """A file descriptor of memory for a `HeartbeatPage`, to be inherited."""
    descriptor = os.memfd_create("unskew-heartbeats")
    os.truncate(descriptor, MOST_RANKS * _ROOM)
    return descriptor
