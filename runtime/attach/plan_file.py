"""What the ranks of a training that is not ours are to do: small files that its watcher replaces.

The plan that they follow, and the number of the last probe that somebody asked for.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from unskew.analytics.core.division import Division
from unskew.collector.paths import Store
from unskew.collector.rights import open_file

ACTS = "UNSKEW_ACTS"
"""In the environment of a rank: somebody watches who may make plans."""
_What = TypeVar("_What")
FILE, PROBE = "plan-for-ranks", "probe-for-ranks"
MOST_BYTES = 1 << 20
PRODUCTS = 9
"""Of a probe: on shared cores a single one took 0.6 to 1.7 times as long as another."""


class PlanForRanks(msgspec.Struct, frozen=True):
    """The division of plan `plan_version`; 0 = nobody has made a plan."""

    plan_version: int
    division: Division


def write_plan(store: Store, run: str, plan: PlanForRanks) -> None:
    """Whole or not at all. Raises `OSError`, `StoreError`."""
    _write(store, run, FILE, plan)


def read_plan(store: Store, run: str) -> PlanForRanks | None:
    """The newest; None where there is none, or what lies there is no plan. Takes some 20 us."""
    return _read(store, run, FILE, PlanForRanks)


def write_probe(store: Store, run: str, number: int) -> None:
    """Ask the ranks for a probe. Raises `OSError`, `StoreError`."""
    _write(store, run, PROBE, number)


def read_probe(store: Store, run: str) -> int:
    """The last one asked for; 0 = none."""
    return _read(store, run, PROBE, int) or 0


def _write(store: Store, run: str, name: str, what: object) -> None:
    store.make(store.commands(run))
    path = store.commands(run) / name
    fresh = path.with_suffix(".new")
    with os.fdopen(open_file(fresh, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(msgspec.json.encode(what))
    fresh.replace(path)


def _read(store: Store, run: str, name: str, kind: type[_What]) -> _What | None:
    try:
        descriptor = os.open(store.commands(run) / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=kind)
    except (OSError, ValueError):
        return None
