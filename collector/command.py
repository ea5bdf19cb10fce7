"""What a person asks of a run."""

from __future__ import annotations

import uuid
from time import time_ns
from typing import Literal

import msgspec


def _now_us() -> int:
    return time_ns() // 1000


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """`target` is a proposal for approve and reject, a mode for mode, and empty for a note, whose text is `reason`."""

    kind: Literal["approve", "reject", "mode", "note"]
    run: str
    by: str
    target: str = ""
    reason: str = ""
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    at_us: int = msgspec.field(default_factory=_now_us)
