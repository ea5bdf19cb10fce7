"""Processes of the store that outlive the one that starts them, and give way to those that train."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from unskew.collector.paths import Store
from unskew.collector.rights import open_file

NICENESS = 10
LIGHT_NICENESS = 5
"""Of work that somebody waits for and that is bounded."""
"""Training goes first where ranks and these processes share cores. They keep a share, though: a spool that grew would slow
readers."""


def start_in_background(store: Store, module: str, log: str) -> int:
    """``python -m module --store ...`` in a session of its own; its output goes to `log` in the store. Its pid.

    Raises `OSError`.
    """
    os.close(open_file(store.root / log, os.O_WRONLY))
    return os.posix_spawn(
        sys.executable,
        # -P: a folder named like one of our imports in the caller's directory must not shadow it.
        [sys.executable, "-P", "-m", module, "--store", str(store.root)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(store.root / log), os.O_WRONLY | os.O_APPEND, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
    )


def lower_priority(*, light: bool = False) -> None:
    """Let this thread, and those it starts from now on, give way to others."""
    os.setpriority(os.PRIO_PROCESS, 0, max(_niceness(light=light), os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # its waking pushes nobody aside


def lower_session(*, light: bool = False) -> None:
    """The same for this process, begun by `start_in_background`, where the kernel shares cores among sessions first: niceness
    counts within one's own alone there."""
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_niceness(light=light)))


def _niceness(*, light: bool) -> int:
    return LIGHT_NICENESS if light else NICENESS
