"""Where everything lies in a store folder. One store serves many runs.

::

    spool/<run>/<writer>/<first seq>.jsonl   the truth until sealed: one folder per writer, one JSON object per line
    sealed/<run>/<number>.parquet            the truth afterwards: immutable, sorted
    published/<projection>-<number>.parquet  aggregates of the log: rollups and the like, for quick answers
    commands/<run>/                          what people ask of a run's controller
    checkpoints/<run>/<iterations>/          layers with their optimiser state, as they were after so many iterations
    manifest.json                            which sealed files exist and which spool files they replace
    store.duckdb                             a snapshot with every view, for other tools; anybody may open it
    locks/                                   who is alive
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import msgspec

from unskew.collector import rights

DEFAULT_ROOT = "data/store"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")


class StoreError(ValueError):
    """A store that cannot serve; the message is one sentence: what is wrong, where, what is allowed."""


def checked_name(what: str, name: str) -> str:
    """`name`, when it can be a file name; raises `StoreError` otherwise."""
    if not _NAME.fullmatch(name):
        raise StoreError(f"{what} {name!r} is not allowed: letters, digits and . _ @ + - after a letter or digit")
    return name


class Store(msgspec.Struct, frozen=True):
    """A store folder; nothing is created before somebody writes."""

    root: Path

    @staticmethod
    def locate(option: str | os.PathLike[str] | None) -> Store:
        """`option`, else $UNSKEW_STORE, else ./data/store. Raises `StoreError` when something else lies at that path, or what
        this user may not read."""
        root = Path(option or os.environ.get("UNSKEW_STORE") or DEFAULT_ROOT).expanduser().absolute()
        try:
            str(root).encode()
        except UnicodeEncodeError as error:
            raise StoreError(f"store {str(root)!a}: its path is not UTF-8") from error
        closed = StoreError(f"store {root} cannot be read: this user is not let into its folder")
        try:
            for folder in (root, *root.parents):
                if folder.exists() and not folder.is_dir():
                    raise StoreError(f"store {root}: {folder} is a file, a folder (or nothing yet) is needed there")
            if root.exists() and not os.access(root, os.R_OK | os.X_OK):
                raise closed
        except PermissionError as error:
            raise closed from error
        return Store(root)

    def make(self, folder: Path | None = None, *, mode: int = rights.PRIVATE) -> None:
        """Create the store, with the rights `mode`, where there is none, and `folder` in it; raises `StoreError`."""
        path = self.root
        try:
            rights.make_folder(path, mode)
            if folder is not None:
                rights.make_folder(path := folder)
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error.strerror or error}; name a writable folder with --store") from error

    def enter(self, *, mode: int | None = None) -> None:
        """Before a command or a service writes: the store is made, or can be written and holds files and folders alone.

        `mode`: the rights that were asked for. Raises `StoreError`.
        """
        self.make(mode=mode or rights.PRIVATE)
        has = stat.S_IMODE(self.root.stat().st_mode)
        if mode not in (None, has):
            raise StoreError(f"store {self.root} has the rights {has:o} already, not {mode:o}: chmod changes them")
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise StoreError(f"store {self.root} cannot be written here: dashboard, sql, diagnose and watch only read it")
        for sentence in rights.strange(self.root):
            raise StoreError(sentence)

    def spool(self, run: str) -> Path:
        return self.root / "spool" / checked_name("run", run)

    def commands(self, run: str) -> Path:
        return self.root / "commands" / checked_name("run", run)

    def checkpoints(self, run: str) -> Path:
        return self.root / "checkpoints" / checked_name("run", run)

    def sealed(self, run: str) -> Path:
        return self.root / "sealed" / checked_name("run", run)

    def lock(self, name: str) -> Path:
        return self.root / "locks" / checked_name("lock", name)

    @property
    def maintenance(self) -> Path:
        """The lock that asks the collector to leave the store for a while."""
        return self.lock("maintenance")

    @property
    def trouble(self) -> Path:
        """What keeps the collector from going on, while something does."""
        return self.root / "trouble"

    @property
    def spill(self) -> Path:
        """Where the collector's queries put what exceeds their memory."""
        return self.root / "spill"

    @property
    def database(self) -> Path:
        return self.root / "store.duckdb"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    def spooled_runs(self) -> list[str]:
        """Runs with a spool folder, by name."""
        try:
            return sorted(
                entry.name for entry in os.scandir(self.root / "spool") if _NAME.fullmatch(entry.name) and entry.is_dir()
            )
        except FileNotFoundError:
            return []
