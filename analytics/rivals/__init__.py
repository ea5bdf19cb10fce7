"""Published fail-slow detectors behind one interface, beside ours."""

from __future__ import annotations

from collections.abc import Callable

from unskew.analytics.rivals.greyhound import Greyhound
from unskew.analytics.rivals.method import Method
from unskew.analytics.rivals.nvrx import Nvrx
from unskew.analytics.rivals.ours import Unskew
from unskew.analytics.rivals.resihp import ResiHP
from unskew.analytics.rivals.traceml import Traceml

METHODS: dict[str, Callable[[], Method]] = {
    "unskew": Unskew,
    "resihp": ResiHP,
    "greyhound": Greyhound,
    "nvrx": Nvrx,
    "traceml": Traceml,
}
"""name -> a fresh detector of that kind with its published settings"""
