"""What a device reports about itself (NVML), as evidence in the verdict on it: clocks, why they are held down, memory errors.

It never decides: a held-down clock is a reason for slowness, not slowness. Only what was read since the slowness began is
evidence of it; reasons and errors that were there when the run began are separated from those that came later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from unskew.collector.events import GpuState, Verdict


class GpuHistory(msgspec.Struct, frozen=True):
    """The first state that a rank's device reported, and the newest."""

    first: GpuState
    newest: GpuState


def remembered(known: Mapping[int, GpuHistory], states: Iterable[GpuState]) -> dict[int, GpuHistory]:
    """With these states as well, oldest first."""
    after = dict(known)
    for state in states:
        after[state.rank] = GpuHistory(after[state.rank].first if state.rank in after else state, state)
    return after


def with_gpu(verdict: Verdict, known: Mapping[int, GpuHistory]) -> Verdict:
    """The verdict on a slow device with `evidence["gpu"]`, where its device has reported something since the slowness began."""
    rank = verdict.culprits[0].rank if verdict.cause == "slow_device" and verdict.culprits else None
    history = None if rank is None else known.get(rank)
    if history is None or history.newest.iteration is None or history.newest.iteration < verdict.since_iteration:
        return verdict
    first, now = history.first, history.newest
    new_reasons = tuple(reason for reason in now.held_down_by if reason not in first.held_down_by)
    evidence: dict[str, Any] = {
        "at_iteration": now.iteration,
        "clock_mhz": now.clock_mhz,
        "clock_mhz_when_the_run_began": first.clock_mhz,
        "highest_clock_mhz": now.highest_clock_mhz,
        "held_down_by": list(now.held_down_by),
        "held_down_by_since_the_run_began": list(new_reasons),
        "temperature_c": now.temperature_c,
        "uncorrected_errors": now.uncorrected_errors,
        "new_uncorrected_errors": _more(first.uncorrected_errors, now.uncorrected_errors),
    }
    sentences = [sentence for sentence in (_clock(now, new_reasons), _errors(evidence["new_uncorrected_errors"])) if sentence]
    sentence = "; ".join([verdict.sentence, *sentences])
    return msgspec.structs.replace(verdict, sentence=sentence, evidence={**verdict.evidence, "gpu": evidence})


def _clock(now: GpuState, reasons: tuple[str, ...]) -> str:
    """Why the clock is lower than when the run began; "" where nothing new holds it down."""
    if not reasons:
        return ""
    clock = f" at {now.clock_mhz} of {now.highest_clock_mhz} MHz" if now.clock_mhz and now.highest_clock_mhz else ""
    heat = f", {now.temperature_c} C" if now.temperature_c is not None else ""
    return f"its clock is held down{clock} by: {', '.join(reasons)}{heat}"


def _more(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _errors(new: int | None) -> str:
    return f"{new} uncorrected memory error{'s' * (new != 1)} since the run began" if new else ""
