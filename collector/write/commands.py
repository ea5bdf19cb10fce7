"""What people ask of a run: one file per command, written whole, read once by the run's controller.

A command to a run without a living controller is refused at once, because nobody would ever read it.
"""

from __future__ import annotations

import os

import msgspec

from unskew.collector.command import Command
from unskew.collector.locks import HeldLock, hold, is_held
from unskew.collector.paths import Store, StoreError, checked_name, make_folder

_WAITING, _TAKEN, _REFUSED = ".json", ".taken", ".refused"


class CommandError(StoreError):
    """The command cannot reach a controller; one sentence."""


def _lock_name(run: str) -> str:
    return f"controller-{checked_name('run', run)}"


def hold_controller_lock(store: Store, run: str) -> HeldLock:
    """Say "I am the controller of `run`" until release or death. Raises `CommandError` when another process is."""
    held = hold(store.lock(_lock_name(run)))
    if held is None:
        raise CommandError(f"run {run} has a living controller already")
    return held


def controller_alive(store: Store, run: str) -> bool:
    return is_held(store.lock(_lock_name(run)))


def send(store: Store, run: str, command: Command) -> None:
    """Leave a command for the run's controller. Raises `CommandError` when none is alive."""
    if not controller_alive(store, run):
        raise CommandError(f"run {run} has no living controller in {store.root}: nobody would act on {command.kind!r}")
    folder = store.commands(run)
    make_folder(folder)
    path = folder / f"{command.at_us:017d}-{checked_name('command id', command.id)}{_WAITING}"
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(command))
    fresh.replace(path)


class Inbox:
    """The controller's side. A command is given once, also to a later controller; an unreadable file is set aside."""

    def __init__(self, store: Store, run: str) -> None:
        self._folder = store.commands(run)
        self._taken = {path.stem.partition("-")[2] for path in self._folder.glob(f"*{_TAKEN}")}

    def poll(self) -> list[Command]:
        """New commands in the order they were given."""
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(_WAITING))  # noqa: PTH208 - many a second
        except FileNotFoundError:
            return []
        commands: list[Command] = []
        for name in names:
            path = self._folder / name
            try:
                command = msgspec.json.decode(path.read_bytes(), type=Command)
            except msgspec.DecodeError:
                path.rename(path.with_suffix(_REFUSED))
                continue
            path.rename(path.with_suffix(_TAKEN))
            if command.id not in self._taken:
                self._taken.add(command.id)
                commands.append(command)
        return commands
