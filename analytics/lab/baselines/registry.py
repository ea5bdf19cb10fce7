"""Published fail-slow detectors behind one interface, beside ours."""

from __future__ import annotations

from collections.abc import Callable

from unskew.analytics.lab.baselines.greyhound import GreyhoundDetector
from unskew.analytics.lab.baselines.nvrx import NvrxDetector
from unskew.analytics.lab.baselines.ours import UnskewDetector
from unskew.analytics.lab.baselines.resihp import ResihpDetector
from unskew.analytics.lab.baselines.traceml import TracemlDetector
from unskew.analytics.replay.method import Method

METHODS: dict[str, Callable[[], Method]] = {
    "unskew": UnskewDetector,
    "resihp": ResihpDetector,
    "greyhound": GreyhoundDetector,
    "nvrx": NvrxDetector,
    "traceml": TracemlDetector,
}
"""name -> a fresh detector of that kind with its published settings"""
NEED_LENGTHS = frozenset({"unskew", "resihp"})
"""Those that predict iterations from their batches, and wait for a predictor."""
