"""A run as it goes: in a terminal one view that is redrawn, elsewhere plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import msgspec
from rich.console import Console
from rich.live import Live

from unskew.collector.files.tail import Entry
from unskew.terminal.live_state import LiveState, fold
from unskew.terminal.live_view import SILENT, Facts, plain, render

REDRAW_S = 0.5
PLAIN_LINE_S = 5.0
QUIET_S = 60.0
"""A log that does not change for so long is told: ranks write a heartbeat every second."""


class Screen:
    """Feeds log entries to the view. A context manager: on exit the last state stays on screen.

    Whatever fails in here ends nothing but the view of that moment; on exit one line on stderr reports it.
    """

    def __init__(self, console: Console, facts: Facts) -> None:
        self.state = LiveState()
        self._console, self._facts = console, facts
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._drawn_s = float("-inf")
        self._printed = ""
        self._failure = ""
        self._heard_s = time.monotonic()

    def __enter__(self) -> Screen:
        with self._surviving():
            if self._live is not None:
                self._live.start()
            else:
                self._print(", ".join(f"{label}: {value}" for label, value in self._facts))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._surviving():
            self._draw()
        with self._surviving():
            if self._live is not None:
                self._live.stop()
        if self._failure:
            with suppress(OSError):
                print(f"the live view is incomplete, training is not affected: {self._failure}", file=sys.stderr)

    def feed(self, entry: Entry) -> None:
        """Take one entry of the log."""
        self.heard()
        with self._surviving():
            before = self.state
            self.state = fold(self.state, entry)
            if self._live is None and self.state.lines is not before.lines:
                line = self.state.lines[-1]
                where = "" if line.iteration is None else f"after iteration {line.iteration}  "
                self._print(f"{where}{line.sentence.topic}: {line.sentence.text}")
                if line.sentence.then:
                    self._print(f"    next: {line.sentence.then}")
            if self._live is None and self.state.waiting not in (None, before.waiting):
                self._print(f"{self.state.waiting} waits for: unskew approve {self.state.waiting} --by NAME --reason TEXT")

    def heard(self, ago_s: float = 0.0) -> None:
        """Something was written to the log, so long ago."""
        self._heard_s = time.monotonic() - ago_s

    def controlled(self, alive: bool) -> None:
        """Whether a living controller holds the run."""
        self.state = msgspec.structs.replace(self.state, controlled=alive)

    def tick(self) -> None:
        """Redraw when it is time to; call it often."""
        self._report_silence()
        if time.monotonic() - self._drawn_s >= (PLAIN_LINE_S if self._live is None else REDRAW_S):
            with self._surviving():
                self._draw()

    def _report_silence(self) -> None:
        silent_s = time.monotonic() - self._heard_s
        going_on = self.state.run.started is not None and self.state.run.finished is None and self.state.controlled
        before, now = self.state.silent, going_on and silent_s >= QUIET_S
        self.state = msgspec.structs.replace(self.state, silent=now)
        if self._live is None and now and not before:
            with self._surviving():
                self._print(SILENT)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a closed terminal, a state that nobody thought of
            self._failure = self._failure or f"{type(error).__name__}: {error}"

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        if self._live is not None:
            self._live.update(render(self.state, self._facts, *self._console.size), refresh=True)
        elif self.state.iteration is not None and (line := plain(self.state)) != self._printed:
            self._printed = line
            self._print(line)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
