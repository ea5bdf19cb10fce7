"""Published fail-slow detectors behind one interface, beside ours."""

from __future__ import annotations

from collections.abc import Callable

from unskew.analytics.lab.baselines.greyhound import Greyhound
from unskew.analytics.lab.baselines.method import Method
from unskew.analytics.lab.baselines.nvrx import Nvrx
from unskew.analytics.lab.baselines.ours import Unskew
from unskew.analytics.lab.baselines.resihp import ResiHP
from unskew.analytics.lab.baselines.traceml import Traceml

METHODS: dict[str, Callable[[], Method]] = {
    "unskew": Unskew,
    "resihp": ResiHP,
    "greyhound": Greyhound,
    "nvrx": Nvrx,
    "traceml": Traceml,
}
"""name -> a fresh detector of that kind with its published settings"""
