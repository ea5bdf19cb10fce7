"""Published fail-slow detectors behind one interface, beside ours."""

from __future__ import annotations

from collections.abc import Callable

from unskew.analytics.rivals.method import Method
from unskew.analytics.rivals.ours import Unskew

METHODS: dict[str, Callable[[], Method]] = {"unskew": Unskew}
"""name -> a fresh detector of that kind with its published settings"""
