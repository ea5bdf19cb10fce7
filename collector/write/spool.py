"""Handing telemetry to the log from a training loop: append to a list, a helper thread encodes and writes.

Cost in the loop: one clock read and one list append. The loop never waits for the disk: when the disk stalls the buffer fills
up to `capacity`, further events are counted by type, and a `Dropped` with the counts is written once the disk takes lines
again.
Needs only msgspec, because ranks import it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from time import time_ns
from typing import TypeVar

from unskew.collector.events import Dropped, Telemetry, tag_of
from unskew.collector.files.loop_parts import LoopPart
from unskew.collector.files.segment import SpoolSegment, flush, segment_names, telemetry_lines
from unskew.collector.paths import Store, StoreError, checked_name

ROTATE_BYTES = 512 * 1024
"""A new file beyond this: readers parse open files whole, so they are kept short (about 2,000 spans)."""
ROTATE_EVENTS = 4_000
"""Or beyond so many events, of which a line may hold several."""
FLUSH_LINES = 1000
"""A longer backlog is written as several flushes: readers take a flush whole."""

_Item = TypeVar("_Item")


def _take_all(items: list[_Item]) -> list[_Item]:
    # A slice and a del of the same length are atomic under the GIL, and appenders only add behind them.
    taken = items[:]
    del items[: len(taken)]
    return taken


class _Receipt:
    """One `hand_over` in flight."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.complete = False


class SpoolWriter:
    """One writer (a process incarnation such as ``rank-0003.1``) of one run. Create it after a fork: no thread survives one.

    Raises `StoreError` when the writer's name was used before or the store cannot be written.
    """

    def __init__(self, store: Store, run: str, writer: str, *, capacity: int = 100_000, flush_s: float = 0.1) -> None:
        self._folder = store.spool(run) / checked_name("writer", writer)
        store.make(self._folder)
        if segment_names(self._folder):
            raise StoreError(f"writer {writer} of run {run} has written before: a new process needs a new writer name")
        self._capacity = capacity
        self._flush_s = flush_s
        self._buffer: list[tuple[int, Telemetry | LoopPart]] = []
        self._receipts: list[_Receipt] = []
        self._dropped: Counter[str] = Counter()
        self._dropped_lock = threading.Lock()
        self.problem = ""
        """Why the disk did not take the last flush, as the system says it; "" when it did."""
        self._wake = threading.Event()
        self._closing = False
        # What follows belongs to the helper thread alone.
        self._segment: SpoolSegment | None = None
        self._unwritten: deque[tuple[int, bytes]] = (
            deque()
        )  # flushes, each with the first seq in it; of the first perhaps a rest
        self._next_seq = self._written_seq = 0
        self._complete = True
        self._whole = False
        self._thread = threading.Thread(target=self._serve, name=f"spool-{writer}", daemon=True)
        self._thread.start()

    def append(self, event: Telemetry | LoopPart) -> None:
        """Take an event, or several as a part of a loop; never blocks, drops when `capacity` of them wait. Any thread may
        call."""
        if len(self._buffer) < self._capacity:
            self._buffer.append((time_ns(), event))
        else:
            self._drop(event)

    def flush_soon(self) -> None:
        """Have what was appended so far written now rather than within `flush_s`; waits for nothing."""
        self._wake.set()

    def hand_over(self, timeout_s: float = 0.005) -> bool:
        """Wait until everything appended so far is with the kernel, at most `timeout_s`.

        False when that took longer, or when an event was dropped since the previous call: the log is not complete.
        """
        receipt = _Receipt()
        self._receipts.append(receipt)
        self._wake.set()
        return receipt.done.wait(timeout_s) and receipt.complete

    @property
    def unwritten(self) -> int:
        """How many events were appended that are not with the kernel, those dropped since it took the last flush among them."""
        with self._dropped_lock:
            return len(self._buffer) + self._next_seq - self._written_seq + self._dropped.total()

    def close(self, timeout_s: float = 2.0) -> bool:
        """Write what is left and stop; False when the disk did not take all of it, or took longer than `timeout_s`."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._whole

    def _drop(self, event: Telemetry | LoopPart) -> None:
        with self._dropped_lock:
            for one in event.events() if isinstance(event, LoopPart) else (event,):
                self._dropped[tag_of(type(one)).partition("@")[0]] += 1

    def _serve(self) -> None:
        while not self._closing:
            self._wake.wait(self._flush_s)
            self._wake.clear()
            self._flush()
        self._whole = self._flush()
        if self._segment is not None:
            self._segment.close()

    def _flush(self) -> bool:
        """Whether all that was appended is with the kernel."""
        receipts = _take_all(self._receipts)
        written = self._write()
        if written:
            self._encode(_take_all(self._buffer))
            written = self._write()
        for receipt in receipts:
            receipt.complete = written and self._complete
            receipt.done.set()
        if receipts:
            self._complete = True
        return written

    def _write(self) -> bool:
        """Whether all of `_unwritten` is with the kernel; what is not is tried again at the next flush."""
        try:
            while self._unwritten:
                first, data = self._unwritten[0]
                if self._segment is None:
                    self._segment = SpoolSegment(self._folder, first)
                size = self._segment.write(data)
                if size < len(data):
                    self._unwritten[0] = first, data[size:]
                    continue
                self._unwritten.popleft()
                self._written_seq = self._unwritten[0][0] if self._unwritten else self._next_seq
                if self._segment.size >= ROTATE_BYTES or self._written_seq - self._segment.first >= ROTATE_EVENTS:
                    # Before the old one is let go: a rank without a locked file has ended, for a collector.
                    full, self._segment = self._segment, SpoolSegment(self._folder, self._written_seq)
                    full.close()
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False
        self.problem = ""
        return True

    def _encode(self, batch: list[tuple[int, Telemetry | LoopPart]]) -> None:
        for start in range(0, len(batch), FLUSH_LINES):
            self._encode_flush(batch[start : start + FLUSH_LINES])
        with self._dropped_lock:
            dropped, self._dropped = self._dropped, Counter()
        if dropped:
            self._complete = False
            self._encode_flush([(time_ns(), Dropped(count=dropped.total(), types=dict(dropped)))])

    def _encode_flush(self, batch: Sequence[tuple[int, Telemetry | LoopPart]]) -> None:
        try:
            lines, next_seq = telemetry_lines(self._next_seq, batch)
        except (TypeError, ValueError, OverflowError):  # a value JSON cannot hold
            if len(batch) == 1:
                self._drop(batch[0][1])
            else:  # one bad event must not end the log of the rest
                middle = len(batch) // 2
                self._encode_flush(batch[:middle])
                self._encode_flush(batch[middle:])
        else:
            self._unwritten.append((self._next_seq, flush(lines)))
            self._next_seq = next_seq
