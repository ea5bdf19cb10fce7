"""The plan that the ranks of a training that is not ours are to follow: a small file that its watcher replaces."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from unskew.analytics.core.division import Division
from unskew.collector.paths import Store
from unskew.collector.rights import open_file

ACTS = "UNSKEW_ACTS"
"""In the environment of a rank: somebody watches who may make plans."""
FILE = "plan-for-ranks"
MOST_BYTES = 1 << 20


class PlanForRanks(msgspec.Struct, frozen=True):
    """The division of plan `plan_version`; 0 = nobody has made a plan."""

    plan_version: int
    division: Division


def write_plan(store: Store, run: str, plan: PlanForRanks) -> None:
    """Whole or not at all. Raises `OSError`, `StoreError`."""
    store.make(store.commands(run))
    path = _path(store, run)
    fresh = path.with_suffix(".new")
    with os.fdopen(open_file(fresh, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(msgspec.json.encode(plan))
    fresh.replace(path)


def read_plan(store: Store, run: str) -> PlanForRanks | None:
    """The newest; None where there is none, or what lies there is no plan. Takes some 20 us."""
    try:
        descriptor = os.open(_path(store, run), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=PlanForRanks)
    except (OSError, ValueError):
        return None


def _path(store: Store, run: str) -> Path:
    return store.commands(run) / FILE
