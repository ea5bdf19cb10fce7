"""Advisory locks that die with their process: `flock`, so that kill -9 leaves nothing to clean up.

A lock belongs to an open file: a forked child shares it, a program started by exec does not.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from unskew.collector.rights import make_folder, open_file


class HeldLock:
    """A lock that this process holds until `release` (or its death); also a context manager."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def hold(path: Path, *, wait_s: float = 0.2) -> HeldLock | None:
    """Take the lock at `path`; None when another keeps it for `wait_s` (a probe by `is_held` takes microseconds)."""
    make_folder(path.parent)
    descriptor = open_file(path, os.O_RDWR, lock=True)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(0.01)
        else:
            return HeldLock(descriptor)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock at `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except PermissionError:  # somebody who may only look at the store
        return _in_kernels_table(path)
    except OSError:  # a link, or what else is no lock: nobody holds that
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _in_kernels_table(path: Path) -> bool:
    """The same, asked of the kernel's list of locks, which everybody may read (Linux)."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(fields[1] == "FLOCK" and place in fields for fields in map(str.split, lines))
