"""The run's control stream, with the version that its one writer expects."""

from __future__ import annotations

from unskew.collector.events import Control
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream


class ControlLog:
    """Every decision of the controller, on disk before it is acted upon."""

    def __init__(self, store: Store, run: str) -> None:
        self._stream = ControlStream(store, run, f"run/{run}", "controller")

    def append(self, *events: Control, actor: str = "controller") -> None:
        """One batch: all of it is in the log, or none."""
        self._stream.append(self._stream.version, events, actor=actor)

    def close(self) -> None:
        self._stream.close()
