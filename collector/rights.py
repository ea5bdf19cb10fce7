"""Who may read and write what of a store: whoever its folder lets. What is made in it takes the rights of the folder around it.

The umask of whoever runs us has no say, neither where it would open a store to others nor where it would close a shared one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PRIVATE = 0o700
SHARED = 0o2770
"""The set-group-ID bit: what a member of the group makes belongs to the group."""


def make_folder(path: Path, mode: int | None = None) -> None:
    """Create a folder, and those above it that are missing, with `mode` (default: that of the folder it lies in).

    Raises `OSError`.
    """
    if path.is_dir():
        return
    if mode is None:
        make_folder(path.parent)
        mode = stat.S_IMODE(path.parent.stat().st_mode)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another process was faster
        path.mkdir(mode)
        path.chmod(mode)


def open_file(path: Path, flags: int, *, lock: bool = False) -> int:
    """A descriptor of a regular file, made when it is missing; `lock`: for those alone who may write, because whoever can open
    a lock can keep it. Raises `OSError`, also for a link, which is not followed."""
    mode = mode_of_files(path.parent)
    if lock:
        mode = mode & 0o222 | (mode & 0o222) << 1
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
        os.fchmod(descriptor, mode)
    return descriptor


def mode_of_files(folder: Path) -> int:
    """The rights of a file in `folder`."""
    return stat.S_IMODE(folder.stat().st_mode) & 0o666


def take_rights_of(folder: Path) -> int:
    """As `as_rights_of`, from now on; returns the umask before."""
    return os.umask(0o777 & ~folder.stat().st_mode)


@contextmanager
def as_rights_of(folder: Path) -> Iterator[None]:
    """Whatever this process makes meanwhile, libraries included, gets the rights of `folder`."""
    before = take_rights_of(folder)
    try:
        yield
    finally:
        os.umask(before)


def strange(folder: Path) -> Iterator[str]:
    """Why a store has none of what below `folder` is neither file nor folder: a sentence about each."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield f"{entry.path} is a link: a store holds none, because what is written or removed there is elsewhere"
            elif entry.is_dir():
                with suppress(FileNotFoundError):  # the collector removed it
                    yield from strange(Path(entry.path))
            elif not entry.is_file() and Path(entry.path).exists():
                yield f"{entry.path} is neither a file nor a folder: a store holds none, because who opens it may wait for ever"
