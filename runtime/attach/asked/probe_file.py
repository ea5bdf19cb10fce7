"""Small files that the watcher of a training replaces and its ranks read; one of them: the last probe that was asked for.

A rank imports this before it trains, so it imports little.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from unskew.collector.paths import Store
from unskew.collector.rights import open_file

_What = TypeVar("_What")
FILE = "probe-for-ranks"
MOST_BYTES = 1 << 20
PRODUCTS = 9
"""Of a probe: on shared cores a single one took 0.6 to 1.7 times as long as another."""


def write_probe(store: Store, run: str, number: int) -> None:
    """Ask the ranks for a probe. Raises `OSError`, `StoreError`."""
    write_file(store, run, FILE, number)


def read_probe(store: Store, run: str) -> int:
    """The last one asked for; 0 = none."""
    return read_file(store, run, FILE, int) or 0


def write_file(store: Store, run: str, name: str, what: object) -> None:
    """Whole or not at all. Raises `OSError`, `StoreError`."""
    store.make(store.commands(run))
    path = store.commands(run) / name
    fresh = path.with_suffix(".new")
    with os.fdopen(open_file(fresh, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(msgspec.json.encode(what))
    fresh.replace(path)


def read_file(store: Store, run: str, name: str, kind: type[_What]) -> _What | None:
    """The newest; None where there is none, or what lies there is something else. Takes some 20 us."""
    try:
        descriptor = os.open(store.commands(run) / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=kind)
    except (OSError, ValueError):
        return None
