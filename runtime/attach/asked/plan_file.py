"""The plan that the ranks of a training that is not ours are to follow: a small file that its watcher replaces."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.division import Division
from unskew.collector.paths import Store
from unskew.runtime.attach.asked.probe_file import read_file, write_file

ACTS = "UNSKEW_ACTS"
"""In the environment of a rank: somebody watches who may make plans."""
FILE = "plan-for-ranks"


class PlanForRanks(msgspec.Struct, frozen=True):
    """The division of plan `plan_version`; 0 = nobody has made a plan."""

    plan_version: int
    division: Division


def write_plan(store: Store, run: str, plan: PlanForRanks) -> None:
    """Whole or not at all. Raises `OSError`, `StoreError`."""
    write_file(store, run, FILE, plan)


def read_plan(store: Store, run: str) -> PlanForRanks | None:
    """The newest; None where there is none, or what lies there is no plan."""
    return read_file(store, run, FILE, PlanForRanks)
