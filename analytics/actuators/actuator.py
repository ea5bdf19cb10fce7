"""One small interface for whatever advice can do, and what an actuator is given to decide on."""

from __future__ import annotations

from statistics import fmean
from typing import Any, Protocol

import msgspec

from unskew.analytics.actuators.times import JobTimes
from unskew.analytics.core.division import Division
from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.changes import describe
from unskew.analytics.scheduler.cost_benefit import interval
from unskew.analytics.scheduler.propose import Proposal
from unskew.collector.events import LoaderDivided, Verdict

LEAST_GAIN = 0.03
"""A smaller part of a step is not worth a change."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """A training that is not ours, as it is now. `offer`: what its loop lets be divided, None = nothing; `batches`: the last
    global batches, as its loader has them, `fitted_on`: how many iterations show what their lengths cost; `slow`: rank -> the
    open verdict that names it, `handed`: those that were handed on already; `division` is in force."""

    iteration: int
    plan: Plan
    division: Division
    times: JobTimes
    batches: tuple[tuple[float, ...], ...]
    fitted_on: int = 0
    slow: dict[int, Verdict] = {}
    offer: LoaderDivided | None = None
    hand_to: str = ""
    handed: frozenset[int] = frozenset()


class Actuator(Protocol):
    """One thing that can be done about a slow rank."""

    @property
    def name(self) -> str: ...

    def propose(self, now: Situation) -> tuple[Proposal | None, str]:
        """What it would do, with its gain and cost; or None, and why."""
        ...


def weighed(
    now: Situation, plan: Plan, after_us: list[float], *, by: str, change: str = "", **evidence: Any
) -> tuple[Proposal | None, str]:
    """The proposal of `plan`, under which the batches take `after_us` each, if it gains enough."""
    before_us = now.times.steps_us(now.division, now.batches)
    baseline_us, predicted_us = sum(before_us) / len(before_us), sum(after_us) / len(after_us)
    gain = 1 - predicted_us / baseline_us
    if gain < LEAST_GAIN:
        return None, f"{by} would save {100 * gain:.1f} % of a step, at least {100 * LEAST_GAIN:.0f} % is asked for"
    gains = [was - will for was, will in zip(before_us, after_us, strict=False)]
    window = (plan.division or now.division).window // now.times.micro_batches
    if window > 1:  # of its steps none is that of before
        gains = [fmean(gains[first : first + window]) for first in range(0, len(gains) - window + 1, window)]
    interval_us = interval(gains, drawn=window > 1) if len(gains) > 1 else None
    proposal = Proposal(
        plan=plan,
        change=change or describe(now.plan, plan),
        predicted_us=predicted_us,
        baseline_us=baseline_us,
        gain_percent=100 * gain,
        gain_interval_us=interval_us,
        cost_us=0.0,
        payback_iterations=None,
        moved_layers=0,
        considered=(),
        evidence={
            "actuator": by,
            "slowness": [round(one, 3) for one in now.times.slowness],
            "gain_interval_us": interval_us,
            "batches": len(now.batches),
            **evidence,
        },
    )
    return proposal, ""
