"""The moments of a loop whose tensors are on a GPU, by the GPU's own clock.

The host only launches work and runs ahead: what a pass took is known once the GPU has been through it. So at each moment an
event is put on the stream that computes, and the parts of the loop wait here until theirs are over; then their times are the
events'. Nobody waits for an event: whenever a part is handed on, those before it that are over are resolved. On the loop's own
thread, for another thread that asks for an event breaks the capture of a CUDA graph, and holds the interpreter's lock.

A wait for others is then what the stream stood still for, also where the backend makes nobody but the stream wait (NCCL): the
exposed part of a collective. A host that comes late shows as well, as the stream has nothing to do.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from time import monotonic, monotonic_ns, sleep
from typing import Any

import torch

from unskew.collector.files.loop_parts import LoopPart
from unskew.runtime.attach.clocks.gpu_times import GpuTimes

LOOK_S = 0.01
MOST_EVENTS = 50_000
"""At once; moments beyond them count as those before (a GPU that hangs)."""


def gpu_name(gpu: int) -> str:
    """Of a GPU of this node, which no other has."""
    return str(getattr(torch.cuda.get_device_properties(gpu), "uuid", f"{socket.gethostname()}:{gpu}"))


class StreamClock:
    """Of one loop, on the GPU of this number; `emit` gets the parts, by the GPU's times, in order."""

    def __init__(self, gpu: int, emit: Callable[[LoopPart], None]) -> None:
        self._gpu, self._emit = gpu, emit
        self._free: list[Any] = []
        self._marks: deque[tuple[int, Any]] = deque()
        self._parts: deque[tuple[int, LoopPart]] = deque()
        self._last_ns, self._marking = 0, False
        self._placed: Any = None
        self._times = GpuTimes(monotonic_ns())
        self._stream = torch.cuda.current_stream(gpu)

    def now(self) -> int:
        """The moment, by which it is known until its part is emitted: by the host's clock, each later than the last. Within
        this very call, where garbage is collected, it is the last one."""
        if self._marking:
            return self._last_ns
        self._marking = True
        try:
            now_ns = self._last_ns = max(monotonic_ns(), self._last_ns + 1)
            stream = torch.cuda.current_stream(self._gpu)
            if stream == self._stream and len(self._marks) < MOST_EVENTS and not torch.cuda.is_current_stream_capturing():
                event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record(stream)
                self._marks.append((now_ns, event))
            return now_ns
        finally:
            self._marking = False

    def adopt(self) -> None:
        """The loop computes on the stream that is current now: moments on another, as what that waits for, are none of its."""
        self._stream = torch.cuda.current_stream(self._gpu)

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Between two moments the loop waited for other ranks."""
        self._times.waited(since_ns, until_ns)

    def take(self, part: LoopPart) -> None:
        """A part by the host's moments. Emits those before it that the GPU has been through."""
        self._parts.append((self._marks[-1][0] if self._marks else 0, part))
        self.look()

    def look(self) -> None:
        """Emit the parts that the GPU has been through; on the loop's thread."""
        while self._parts and not torch.cuda.is_current_stream_capturing():
            until_ns, part = self._parts[0]
            marks = list(takewhile(lambda mark, until_ns=until_ns: mark[0] <= until_ns, self._marks))  # type: ignore[misc]
            if marks and not marks[-1][1].query():
                return
            for now_ns, event in marks:
                later_ms = 0.0 if self._placed is None else self._placed.elapsed_time(event)
                self._times.place(now_ns, round(1e6 * later_ms), monotonic_ns())
                self._free += [] if self._placed is None else [self._placed]
                self._placed = event
                self._marks.popleft()
            self._parts.popleft()
            self._emit(self._times.of(part))

    def finish(self, timeout_s: float) -> None:
        """The same with all that was taken; waits for the GPU, at most so long."""
        until_s = monotonic() + timeout_s
        self.look()
        while self._parts and monotonic() < until_s:
            sleep(LOOK_S)
            self.look()
