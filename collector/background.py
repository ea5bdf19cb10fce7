"""Starting a process of the store's that outlives the one that starts it."""

from __future__ import annotations

import os
import sys

from unskew.collector.paths import Store


def start_in_background(store: Store, module: str, log: str) -> int:
    """``python -m module --store ...`` in a session of its own; its output goes to `log` in the store. Its pid.

    Raises `OSError`.
    """
    return os.posix_spawn(
        sys.executable,
        # -P: a folder named like one of our imports in the caller's directory must not shadow it.
        [sys.executable, "-P", "-m", module, "--store", str(store.root)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(store.root / log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
    )
