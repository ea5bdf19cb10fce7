"""Where a run's agent is found by a controller that takes over: its folder stands in a lock that it holds while it lives."""

from __future__ import annotations

from pathlib import Path

from unskew.collector.locks import hold, is_held
from unskew.collector.paths import Store, checked_name


def _lock(store: Store, run: str) -> Path:
    return store.lock(f"agent-{checked_name('run', run)}")


def announce(store: Store, run: str, folder: Path) -> None:
    """Say, until this process ends, that the sockets of the run's agent are in `folder`."""
    if hold(_lock(store, run)) is not None:
        _lock(store, run).write_text(str(folder))


def folder_of_agent(store: Store, run: str) -> Path | None:
    """Where the run's living agent has its sockets; None when there is none."""
    lock = _lock(store, run)
    return Path(lock.read_text()) if is_held(lock) and lock.read_text() else None
