"""Fault SPECs: the arguments of `--fault`, checked before anything starts.

    slow:rank=3,factor=1.8,at=30[,until=60][,phase=F|B|W]    chunks take `factor` times as long in iterations at .. until-1
    kill:rank=6,at=70[,point=POINT]                          SIGKILL inside iteration `at`
    hang:rank=2,at=50                                        main thread stuck, heartbeats go on
    freeze:rank=2,at=50                                      SIGSTOP

Iterations and ranks are numbered from 0. POINT is where in the iteration the rank dies: compute (in the middle of its chunks),
in_sync (before its last bucket of gradients is reduced), before_barrier or before_step (the windows of the commit protocol).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal, get_args

import msgspec

from unskew.analytics.core.plan import splits_backward
from unskew.collector.events import CHUNK_KINDS, FaultInjected

FaultKind = Literal["slow", "kill", "hang", "freeze"]
KillPoint = Literal["compute", "in_sync", "before_barrier", "before_step"]

_REQUIRED = {
    "slow": ("rank", "factor", "at"),
    "kill": ("rank", "at"),
    "hang": ("rank", "at"),
    "freeze": ("rank", "at"),
}
_OPTIONAL = {"slow": ("until", "phase"), "kill": ("point",), "hang": (), "freeze": ()}


MOST_FAULTS = 200
MOST_SLOWDOWN = 1_000.0
"""Of a chunk: what takes longer still is as good as lost, and a hang shows that."""


class FaultError(ValueError):
    """A bad SPEC; the message is one sentence: what is wrong, what is allowed."""


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault to inject. `until` None = to the end, `phase` None = every kind of work; only a kill has a `point`."""

    kind: FaultKind
    rank: int
    at: int
    until: int | None = None
    factor: float | None = None
    phase: str | None = None
    point: KillPoint | None = None

    @property
    def ends_rank(self) -> bool:
        """Whether the rank's process is lost."""
        return self.kind != "slow"

    def slowdown(self, kind: str, iteration: int) -> float:
        """How many times longer a chunk of this kind takes on the fault's rank in this iteration (1.0 = unaffected)."""
        begun = self.at <= iteration and (self.until is None or iteration < self.until)
        return self.factor if self.factor is not None and begun and self.phase in (None, kind) else 1.0

    def event(self) -> FaultInjected:
        """The truth for the log."""
        return FaultInjected(
            kind=self.kind,
            rank=self.rank,
            at_iteration=self.at,
            until_iteration=self.until,
            factor=self.factor,
            phase=self.phase,
        )


def parse_faults(texts: Iterable[str], *, ranks: int, iterations: int, schedule: str = "1f1b") -> tuple[FaultSpec, ...]:
    """All SPECs of a run; besides what `parse_fault` refuses, two that end one rank in one iteration raise `FaultError`."""
    faults: list[FaultSpec] = []
    ended: set[tuple[int, int]] = set()
    for text in texts:
        fault = parse_fault(text, ranks=ranks, iterations=iterations, schedule=schedule)
        faults.append(fault)
        if fault.ends_rank and (fault.rank, fault.at) in ended:
            raise FaultError(f"{text}: two faults end rank {fault.rank} in iteration {fault.at}, one is allowed")
        ended |= {(fault.rank, fault.at)} if fault.ends_rank else set()
    if len(faults) > MOST_FAULTS:
        raise FaultError(f"{len(faults):,} faults are given, allowed: {MOST_FAULTS}")
    for rank in sorted({fault.rank for fault in faults if fault.factor is not None}):
        if (together := _together(faults, rank, schedule)) > MOST_SLOWDOWN:
            raise FaultError(f"rank {rank} is slowed {together:.3g} times by all its faults, allowed: {MOST_SLOWDOWN:g} times")
    return tuple(faults)


def _together(faults: Iterable[FaultSpec], rank: int, schedule: str) -> float:
    """How many times longer a chunk of a rank takes where the most of its faults meet."""
    own = [fault for fault in faults if fault.rank == rank and fault.factor is not None]
    kinds = [kind for kind in CHUNK_KINDS if kind != "W" or splits_backward(schedule)]
    return max(prod(fault.slowdown(kind, at.at) for fault in own) for at in own for kind in kinds)


def parse_fault(text: str, *, ranks: int, iterations: int, schedule: str = "1f1b") -> FaultSpec:
    """One SPEC for a run of `ranks` ranks and `iterations` iterations under `schedule`. Raises `FaultError`.

    >>> parse_fault("slow:rank=3,factor=1.8,at=30", ranks=8, iterations=60).slowdown("F", 30)
    1.8
    """
    kind, _, rest = text.partition(":")
    if kind not in get_args(FaultKind):
        raise FaultError(f"{text}: unknown kind {kind!r}, allowed: {', '.join(get_args(FaultKind))}")
    values = _pairs(text, kind, rest)
    rank = _whole(text, "rank", values["rank"], ranks)
    at = _whole(text, "at", values["at"], iterations)
    until = factor = None
    if "until" in values:
        until = _whole(text, "until", values["until"])
        if until <= at:
            raise FaultError(f"{text}: until={until} must be greater than at={at}")
    if "factor" in values:
        factor = _number(text, "factor", values["factor"])
        if not 1.0 < factor < float("inf"):
            raise FaultError(f"{text}: factor={values['factor']} must be greater than 1 (1.8 = chunks take 1.8x as long)")
    phase = _one_of(text, "phase", values["phase"], CHUNK_KINDS) if "phase" in values else None
    if phase == "W" and not splits_backward(schedule):
        raise FaultError(f"{text}: schedule {schedule} executes no W chunks of their own (B includes them), allowed: F, B")
    point = _one_of(text, "point", values.get("point", "compute"), get_args(KillPoint)) if kind == "kill" else None
    fields = {"kind": kind, "rank": rank, "at": at, "until": until, "factor": factor, "phase": phase, "point": point}
    return msgspec.convert(fields, FaultSpec)


def _pairs(text: str, kind: str, rest: str) -> dict[str, str]:
    allowed = (*_REQUIRED[kind], *_OPTIONAL[kind])
    values: dict[str, str] = {}
    for pair in rest.split(","):
        key, equals, value = pair.partition("=")
        if key not in allowed or not equals:
            raise FaultError(f"{text}: {pair!r} is not a setting of {kind}, allowed: {', '.join(f'{k}=' for k in allowed)}")
        if key in values:
            raise FaultError(f"{text}: {key} is given twice, once is allowed")
        values[key] = value
    for key in _REQUIRED[kind]:
        if key not in values:
            raise FaultError(f"{text}: {key}= is missing, {kind} needs {', '.join(f'{k}=' for k in _REQUIRED[kind])}")
    return values


def _number(text: str, key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise FaultError(f"{text}: {key}={value} is not a number") from None


def _whole(text: str, key: str, value: str, end: int | None = None) -> int:
    number = int(value) if value.isascii() and value.isdecimal() else None
    if number is None or (end is not None and number >= end):
        raise FaultError(f"{text}: {key}={value} must be a whole number {'from 0' if end is None else f'from 0 to {end - 1}'}")
    return number


def _one_of(text: str, key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise FaultError(f"{text}: {key}={value} is not known, allowed: {', '.join(allowed)}")
    return value
