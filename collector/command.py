"""What a person asks of a run."""

from __future__ import annotations

import uuid
from time import time_ns
from typing import Literal

import msgspec


def _now_us() -> int:
    return time_ns() // 1000


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """`target` is a proposal for approve and reject, a mode for mode, the rank to be started for rank ("" = whichever is next),
    the one to be measured for probe, and empty for a note, whose text is `reason`.

    `by` is the name that somebody gives; `user` the operating system's, which the controller reads from the file.
    """

    kind: Literal["approve", "reject", "mode", "note", "rank", "probe"]
    run: str
    by: str
    target: str = ""
    reason: str = ""
    user: str = ""
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    at_us: int = msgspec.field(default_factory=_now_us)


_OURS = ("auto", "controller")
"""The names by which the controller logs what it decides itself."""


def wrong_name(by: str) -> str:
    """What is wrong with the name of somebody who decides; "" when nothing is."""
    if not by.strip():
        return "who decides has no name: the log keeps it for ever"
    if not by.isprintable():  # "auto" with something behind it that nobody sees
        return f"the name {by!a} holds what cannot be seen: the log keeps it for ever"
    return f"{by} is the controller's own name: give yours" if by.strip().casefold() in _OURS else ""
