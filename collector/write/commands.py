"""What people ask of a run: one file per command, written whole, read once by the run's controller.

A command to a run without a living controller is refused at once, because nobody would ever read it. The folder may hold
anything that somebody put there: what is no command is set aside and named in the log, and never holds the controller up.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

import msgspec

from unskew.collector.command import Command, wrong_name
from unskew.collector.events import CommandRefused
from unskew.collector.locks import HeldLock, hold, is_held
from unskew.collector.paths import Store, StoreError, checked_name
from unskew.collector.rights import open_file

MOST_BYTES = 64 * 1024
_AT_ONCE = 100
_LOCK = "controller-"
_WAITING, _TAKEN, _REFUSED = ".json", ".taken", ".refused"


class CommandError(StoreError):
    """The command cannot reach a controller; one sentence."""


def _lock_name(run: str) -> str:
    return f"{_LOCK}{checked_name('run', run)}"


def hold_controller_lock(store: Store, run: str) -> HeldLock:
    """Say "I am the controller of `run`" until release or death. Raises `CommandError` when another process is."""
    held = hold(store.lock(_lock_name(run)))
    if held is None:
        raise CommandError(f"run {run} has a living controller already")
    return held


def controller_alive(store: Store, run: str) -> bool:
    return is_held(store.lock(_lock_name(run)))


def living_runs(store: Store) -> list[str]:
    """The runs with a living controller, the one that began last at the end."""
    locks = [path for path in store.lock("x").parent.glob(f"{_LOCK}*") if is_held(path)]
    return [path.name.removeprefix(_LOCK) for path in sorted(locks, key=lambda path: path.stat().st_mtime_ns)]


def send(store: Store, run: str, command: Command) -> None:
    """Leave a command for the run's controller. Raises `CommandError` when none is alive."""
    if wrong := wrong_name(command.by):
        raise CommandError(wrong)
    if not controller_alive(store, run):
        raise CommandError(f"run {run} has no living controller in {store.root}: nobody would act on {command.kind!r}")
    data = msgspec.json.encode(command)
    if len(data) > MOST_BYTES:
        raise CommandError(f"the command has {len(data):,} bytes, allowed: {MOST_BYTES:,}; give a shorter reason")
    folder = store.commands(run)
    store.make(folder)
    path = folder / f"{command.at_us:017d}-{checked_name('command id', command.id)}{_WAITING}"
    fresh = path.with_suffix(".new")
    with os.fdopen(open_file(fresh, os.O_WRONLY), "wb") as file:
        file.write(data)
    fresh.replace(path)


class Inbox:
    """The controller's side. A command is given once, also to a later controller; what is no command is set aside."""

    def __init__(self, store: Store, run: str) -> None:
        self._run, self._folder = run, store.commands(run)
        self._taken = {path.stem.partition("-")[2] for path in self._folder.glob(f"*{_TAKEN}")}
        self._stuck: set[str] = set()
        """Files that cannot be renamed; each is dealt with once all the same."""

    def poll(self) -> tuple[list[Command], list[CommandRefused]]:
        """New commands in the order they were given, and what is to be logged of files that are none."""
        try:
            names = {name for name in os.listdir(self._folder) if name.endswith(_WAITING)}  # noqa: PTH208 - many a second
        except OSError:  # not there yet, or not to be read
            return [], []
        commands: list[Command] = []
        refused: list[CommandRefused] = []
        for name in sorted(names - self._stuck)[:_AT_ONCE]:
            found = self._read(name)
            try:
                self._set_aside(self._folder / name, _TAKEN if isinstance(found, Command) else _REFUSED)
            except OSError:
                self._stuck.add(name)
            if isinstance(found, CommandRefused):
                refused.append(found)
            elif found.id not in self._taken:
                self._taken.add(found.id)
                commands.append(found)
        return commands, refused

    def _set_aside(self, path: Path, suffix: str) -> None:
        """What is neither file nor folder goes, as nobody who writes enters a store that holds such."""
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            path.rename(path.with_suffix(suffix))
        else:
            path.unlink()

    def _read(self, name: str) -> Command | CommandRefused:
        """The command of a file with the operating system's user it belongs to, or why there is none."""
        user = "somebody"
        try:
            # A link leads elsewhere, and a FIFO would be waited for.
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                user = _user(status.st_uid)
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError("it is not a regular file")
                if status.st_size > MOST_BYTES:
                    raise ValueError(f"it has {status.st_size:,} bytes, allowed: {MOST_BYTES:,}")
                command = msgspec.json.decode(file.read(MOST_BYTES), type=Command)
            if command.run != self._run:
                raise ValueError(f"it is for run {command.run}")
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            why = "it is a link" if isinstance(error, OSError) and error.errno == errno.ELOOP else why
            return CommandRefused(command=f"file {ascii(name)[1:-1]}", by=user, reason=f"no command: {why}", user=user)
        return msgspec.structs.replace(command, user=user)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
