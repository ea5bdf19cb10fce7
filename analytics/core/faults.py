"""Fault SPECs: the arguments of `--fault`, checked before anything starts.

    slow:rank=3,factor=1.8,at=30[,until=60][,phase=F|B|W]    chunks take `factor` times as long in iterations at .. until-1
        [,ramp=10]                                           rising to that over so many iterations
        [,every=10,on=3]                                     in the first `on` of every so many iterations
        [,of=memory]                                         only what waits for memory: weights, attention
    slow_link:rank=0,peer=1,delay_ms=5,at=30[,until=60]      messages to `peer` arrive so much later; ramp, every, on
    kill:rank=6,at=70[,point=POINT][,phase=F]                SIGKILL inside iteration `at`
    hang:rank=2,at=50[,seconds=2]                            main thread stuck, heartbeats go on; for good, or for so long
    freeze:rank=2,at=50[,seconds=1]                          SIGSTOP; for good, or until a SIGCONT
    exception:rank=2,at=50, segfault:rank=2,at=50            the process ends with an error of its code, by SIGSEGV
    full_disk:rank=2,at=50[,until=60]                        nothing that the rank writes is taken
    rejoin:rank=6,at=90                                      a process is started for the lost rank
    random:seed=7,every=20                                   faults at random (random_faults.py)

Iterations and ranks are numbered from 0. POINT is where in the iteration the rank dies: compute (in the middle of its chunks),
in_sync (before its last bucket of gradients is reduced), before_barrier or before_step (the windows of the commit protocol).
`phase` of a fault that strikes: before a chunk of that kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Literal, get_args

import msgspec

from unskew.analytics.core.plan import splits_backward
from unskew.collector.events import CHUNK_KINDS, Fault, FaultKind, SlowPart

KillPoint = Literal["compute", "in_sync", "before_barrier", "before_step"]

_SHAPE = ("ramp", "every", "on")
_REQUIRED = {
    "slow": ("rank", "factor", "at"),
    "slow_link": ("rank", "peer", "delay_ms", "at"),
    **dict.fromkeys(("kill", "hang", "freeze", "exception", "segfault", "full_disk", "rejoin"), ("rank", "at")),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "slow": ("until", "phase", *_SHAPE, "of"),
    "slow_link": ("until", *_SHAPE),
    "kill": ("point", "phase"),
    "hang": ("phase", "seconds"),
    "freeze": ("phase", "seconds"),
    "exception": ("phase",),
    "segfault": ("phase",),
    "full_disk": ("until",),
    "rejoin": (),
}

MOST_FAULTS = 200
MOST_SLOWDOWN = 1_000.0
"""Of a chunk: what takes longer still is as good as lost, and a hang shows that."""
MOST_SECONDS = 3_600.0
"""Of a message's delay, of a pause."""


class FaultError(ValueError):
    """A bad SPEC; the message is one sentence: what is wrong, what is allowed."""


def parse_faults(texts: Iterable[str], *, ranks: int, iterations: int, schedule: str = "1f1b") -> tuple[Fault, ...]:
    """All SPECs of a run; besides what `parse_fault` refuses, two that strike one rank in one iteration raise `FaultError`."""
    faults = [(text, parse_fault(text, ranks=ranks, iterations=iterations, schedule=schedule)) for text in texts]
    return together(faults, schedule=schedule)


def together(named: Iterable[tuple[str, Fault]], *, schedule: str) -> tuple[Fault, ...]:
    """Faults, each with its SPEC, as those of one run. Raises `FaultError` where they are too many or do not go together."""
    faults: list[Fault] = []
    struck: set[tuple[int, int]] = set()
    for text, fault in named:
        faults.append(fault)
        if fault.strikes and (fault.rank, fault.at_iteration) in struck:
            raise FaultError(f"{text}: two faults end rank {fault.rank} in iteration {fault.at_iteration}, one is allowed")
        struck |= {(fault.rank, fault.at_iteration)} if fault.strikes else set()
    if len(faults) > MOST_FAULTS:
        raise FaultError(f"{len(faults):,} faults are given, allowed: {MOST_FAULTS}")
    for rank in sorted({fault.rank for fault in faults if fault.factor is not None}):
        if (most := _slowed(faults, rank, schedule)) > MOST_SLOWDOWN:
            raise FaultError(f"rank {rank} is slowed {most:.3g} times by all its faults, allowed: {MOST_SLOWDOWN:g} times")
    return tuple(faults)


def _slowed(faults: Iterable[Fault], rank: int, schedule: str) -> float:
    """How many times longer a chunk of a rank takes at the most, where all that ever overlap are full."""
    own = [fault for fault in faults if fault.rank == rank and fault.factor is not None]
    full = [msgspec.structs.replace(fault, ramp=None, every=None, on=None) for fault in own]
    kinds = [kind for kind in CHUNK_KINDS if kind != "W" or splits_backward(schedule)]
    return max(prod(fault.slowdown(kind, at.at_iteration) for fault in full) for at in own for kind in kinds)


def parse_fault(text: str, *, ranks: int, iterations: int, schedule: str = "1f1b") -> Fault:
    """One SPEC for a run of `ranks` ranks and `iterations` iterations under `schedule`. Raises `FaultError`.

    >>> parse_fault("slow:rank=3,factor=1.8,at=30", ranks=8, iterations=60).slowdown("F", 30)
    1.8
    """
    kind, _, rest = text.partition(":")
    if kind not in get_args(FaultKind):
        raise FaultError(f"{text}: unknown kind {kind!r}, allowed: {', '.join(get_args(FaultKind))}")
    values = pairs_of(text, kind, rest, _REQUIRED[kind], _OPTIONAL[kind])
    fields: dict[str, Any] = {
        "kind": kind,
        "rank": whole(text, "rank", values["rank"], ranks),
        "at": whole(text, "at", values["at"], iterations),
        **{name: whole(text, name, values[name]) for name in ("until", *_SHAPE) if name in values},
    }
    if "peer" in values:
        fields["peer"] = whole(text, "peer", values["peer"], ranks)
    if "factor" in values:
        fields["factor"] = number(text, "factor", values["factor"])
    fields |= {name: number(text, name, values[name]) for name in ("delay_ms", "seconds") if name in values}
    if "phase" in values:
        fields["phase"] = one_of(text, "phase", values["phase"], CHUNK_KINDS)
    if "of" in values:
        fields["of"] = one_of(text, "of", values["of"], get_args(SlowPart))
    if kind == "kill":
        fields["point"] = one_of(text, "point", values.get("point", "compute"), get_args(KillPoint))
    fault = msgspec.convert(fields, Fault)
    if wrong := _wrong_shape(fault, values) or _wrong_place(fault, values, schedule):
        raise FaultError(f"{text}: {wrong}")
    return fault


def _wrong_shape(fault: Fault, values: dict[str, str]) -> str:
    """What is wrong with how much it does and when; "" when nothing is."""
    if fault.until_iteration is not None and fault.until_iteration <= fault.at_iteration:
        return f"until={fault.until_iteration} must be greater than at={fault.at_iteration}"
    if fault.ramp == 0:
        return "ramp=0 must be 1 or more"
    if (fault.every is None) != (fault.on is None) or not 0 < (fault.on or 1) < (fault.every or 2) or fault.on == 0:
        return "every= and on= go together, allowed: on= from 1 to one less than every="
    if fault.factor is not None and not 1.0 < fault.factor < float("inf"):
        return f"factor={values['factor']} must be greater than 1 and finite (1.8 = chunks take 1.8x as long)"
    for name, value, most in (("delay_ms", fault.delay_ms, 1e3 * MOST_SECONDS), ("seconds", fault.seconds, MOST_SECONDS)):
        if value is not None and not 0.0 < value <= most:
            return f"{name}={values[name]} must be greater than 0 and at most {most:g}"
    return ""


def _wrong_place(fault: Fault, values: dict[str, str], schedule: str) -> str:
    """What is wrong with where it happens; "" when nothing is."""
    if fault.peer == fault.rank:
        return f"peer={fault.peer} is the sender itself, allowed: another rank"
    if fault.phase == "W" and not splits_backward(schedule):
        return f"schedule {schedule} executes no W chunks of their own (B includes them), allowed: F, B"
    if fault.kind == "kill" and "phase" in values and fault.point != "compute":
        return f"point={fault.point} has no chunks, phase= goes with point=compute"
    return ""


def pairs_of(text: str, kind: str, rest: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, str]:
    """``key=value,...`` of a SPEC. Raises `FaultError`."""
    allowed = (*required, *optional)
    values: dict[str, str] = {}
    for pair in rest.split(","):
        key, equals, value = pair.partition("=")
        if key not in allowed or not equals:
            raise FaultError(f"{text}: {pair!r} is not a setting of {kind}, allowed: {', '.join(f'{k}=' for k in allowed)}")
        if key in values:
            raise FaultError(f"{text}: {key} is given twice, once is allowed")
        values[key] = value
    for key in required:
        if key not in values:
            raise FaultError(f"{text}: {key}= is missing, {kind} needs {', '.join(f'{k}=' for k in required)}")
    return values


def number(text: str, key: str, value: str) -> float:
    """A value of a SPEC. Raises `FaultError`."""
    try:
        return float(value)
    except ValueError:
        raise FaultError(f"{text}: {key}={value} is not a number") from None


def whole(text: str, key: str, value: str, end: int | None = None) -> int:
    """A value of a SPEC, below `end`. Raises `FaultError`."""
    found = int(value) if value.isascii() and value.isdecimal() else None
    if found is None or (end is not None and found >= end):
        raise FaultError(f"{text}: {key}={value} must be a whole number {'from 0' if end is None else f'from 0 to {end - 1}'}")
    return found


def one_of(text: str, key: str, value: str, allowed: tuple[str, ...]) -> str:
    """A value of a SPEC. Raises `FaultError`."""
    if value not in allowed:
        raise FaultError(f"{text}: {key}={value} is not known, allowed: {', '.join(allowed)}")
    return value
