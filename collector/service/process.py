"""The collector process: one per store, started on demand, gone when idle.

    python -m unskew.collector.service.process --store DIR

The holder of the lock ``collector`` is the collector. It may be killed at any moment: the next one goes on where the manifest
ends. SIGTERM and Ctrl-C end it between two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unskew.collector.background import lower_priority, lower_session, start_in_background
from unskew.collector.locks import hold, is_held
from unskew.collector.paths import Store, StoreError
from unskew.collector.process_log import report
from unskew.collector.rights import as_rights_of

if TYPE_CHECKING:
    from unskew.collector.service.collecting import Collector

STEP_S = 2.0
"""How often it is looked what is due, or whether somebody asks the collector to leave. Readers do not wait for it."""
IDLE_S = 2.0
"""A run whose controller lives is news enough; what begins later starts a collector of its own."""
BUSY_RETRY_S = 5.0
ALERTS_S = 5.0
"""How often it is looked whether the alerts' process is wanted: there are rules, and none is at it."""
LOOK_S = 2.0
"""How often those who keep a collector look whether one lives."""
ENDING = {signal.SIGTERM, signal.SIGINT}

_started: set[int] = set()


def ensure_collector(store: Store) -> int | None:
    """Start the store's collector unless one is alive or on its way; its pid when this call started one. Takes milliseconds.

    Its output goes to ``collector.log`` in the store. Raises `StoreError` when the store cannot be written.
    """
    if _any_lives(_started) or is_held(store.lock("collector")):
        return None
    store.make()
    pid = start_in_background(store, "unskew.collector.service.process", "collector.log")
    _started.add(pid)
    return pid


def _any_lives(started: set[int]) -> bool:
    """Reap those of our children in `started` that ended; whether one lives."""
    for pid in tuple(started):
        try:
            ended = os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # the caller reaps its children itself
            ended = True
        if ended:
            started.discard(pid)
    return bool(started)


def trouble(store: Store) -> str | None:
    """What keeps the store's collector from going on, in one sentence; None when nothing does, or none lives."""
    if not is_held(store.lock("collector")):
        return None
    try:
        return store.trouble.read_text().strip()
    except OSError:
        return None


def _write_trouble(store: Store, sentence: str | None) -> None:
    with contextlib.suppress(OSError):  # with a full disk, perhaps only the log can have it
        if sentence is None:
            store.trouble.unlink(missing_ok=True)
        else:
            store.trouble.write_text(sentence + "\n")


def serve(store: Store, idle_s: float) -> None:
    """Collect until idle for `idle_s`, asked to end, or asked to leave for maintenance; with the collector's lock held."""
    # Imported here, because the losers of the election need not pay for a database.
    from unskew.collector.alerts.acceptance import waits  # noqa: PLC0415
    from unskew.collector.alerts.process import start_alerts  # noqa: PLC0415
    from unskew.collector.service.collecting import Collector  # noqa: PLC0415
    from unskew.collector.service.showing import Showing  # noqa: PLC0415

    _write_trouble(store, None)
    collecting = Collector(store)
    busy_s, wait_s, reported = time.monotonic(), 0.0, ""
    alerts, next_alerts_s = set[int](), time.monotonic()
    if unaccepted := waits(store):
        report(f"collector: {unaccepted}")
    try:
        with Showing(store) as showing:
            lower_priority()
            while True:
                asked_to_end = signal.sigtimedwait(ENDING, wait_s) is not None or is_held(store.maintenance)
                busy, wait_s, reported = _step(store, collecting, reported)
                showing.allow(allowed=not collecting.behind and not reported)
                # As a whole it gives way from the first snapshot on, for which people wait: a second of a core.
                if collecting.behind or showing.begun:
                    lower_session(light=not collecting.behind)
                if not _any_lives(alerts) and time.monotonic() >= next_alerts_s:
                    next_alerts_s = time.monotonic() + ALERTS_S
                    if (pid := start_alerts(store)) is not None:
                        alerts.add(pid)
                if busy:
                    busy_s = time.monotonic()
                left_s = busy_s + idle_s - time.monotonic()
                if asked_to_end or (not busy and left_s <= 0):
                    return
                if collecting.behind:
                    wait_s = 0.0
                elif not busy:
                    wait_s = min(wait_s, left_s)
    finally:
        collecting.close()


def _step(store: Store, collecting: Collector, reported: str) -> tuple[bool, float, str]:
    """One step: whether it was busy, how long to wait, and what keeps it from going on, printed unless it was `reported`
    before."""
    try:
        busy = collecting.step()
    except StoreError as error:  # the disk refuses, or is full; the spool keeps everything meanwhile
        if str(error) != reported:
            report(f"collector: {error}")
        _write_trouble(store, str(error))
        return False, BUSY_RETRY_S, str(error)
    if reported:
        _write_trouble(store, None)
    return busy, STEP_S, ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m unskew.collector.service.process", description="The collector of one store."
    )
    parser.add_argument("--store", help="folder of the store (default: $UNSKEW_STORE, else ./data/store)")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="end after so many seconds without news or controller")
    options = parser.parse_args(arguments)
    try:
        store = Store.locate(options.store)
        store.enter()
        # Taken by `serve` between steps alone: whoever sees the lock held may ask for an end, and no step is cut.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        lock = hold(store.lock("collector"), wait_s=0.0)
        if lock is None:
            return 0
        with lock, as_rights_of(store.root):
            serve(store, options.idle_s)
    except StoreError as error:
        report(f"collector: {error}")
        return 1
    return 0


class KeptCollector:
    """The store's collector, started again where it has gone. Without one the spools keep everything."""

    def __init__(self, store: Store) -> None:
        self._store, self._next_s, self._problem = store, 0.0, ""

    def keep(self, *, at_once: bool = False) -> None:
        """Now and then; one problem is reported once. `at_once`: whoever keeps it looks no more."""
        if time.monotonic() < self._next_s and not at_once:
            return
        self._next_s, before, self._problem = time.monotonic() + LOOK_S, self._problem, ""
        try:
            ensure_collector(self._store)
        except (OSError, StoreError) as error:
            self._problem = str(error)
            if self._problem != before:
                report(f"unskew: the collector cannot be started: {error}")


if __name__ == "__main__":
    sys.exit(main())
