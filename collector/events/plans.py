"""The life of a change of plan: proposed, decided, issued, applied, scored."""

from __future__ import annotations

from typing import Any

import msgspec

from unskew.collector.events.base import Control


class PlanProposed(Control, frozen=True, kw_only=True, tag="plan_proposed@1"):
    """A change of plan with the numbers that speak for it. `plan` is analytics.core.plan.Plan as plain data.

    `optional` False = minimal recovery after a death. `predicted_us`, `baseline_us`: mean iteration time under the new plan and
    without it, same speeds and batches; `considered` lists the other candidates with their scores; `evidence`:
    estimated speeds, number of the predictor, 95 % interval of the gain, hash of the Scheduler's options. `policy`: the
    published policy whose rule it is, which no gain decides; "" = the Scheduler's.
    """

    proposal: str
    plan_version: int = msgspec.field(name="epoch")
    digest: str
    optional: bool
    reason: str
    verdict: int | None
    plan: dict[str, Any]
    predicted_us: int | None
    baseline_us: int | None
    gain_percent: float | None
    cost_us: int
    payback_iterations: int | None
    at_iteration: int
    considered: tuple[dict[str, Any], ...] = ()
    change: str = ""
    evidence: dict[str, Any] = msgspec.field(default_factory=dict)
    policy: str = ""


class PlanApproved(Control, frozen=True, kw_only=True, tag="plan_approved@1"):
    proposal: str
    by: str
    reason: str
    user: str = ""


class PlanRejected(Control, frozen=True, kw_only=True, tag="plan_rejected@1"):
    proposal: str
    by: str
    reason: str
    user: str = ""


class PlanExpired(Control, frozen=True, kw_only=True, tag="plan_expired@1"):
    proposal: str
    reason: str


class PlanKept(Control, frozen=True, kw_only=True, tag="plan_kept@1"):
    """The Scheduler was asked and proposes nothing, for this reason."""

    plan_version: int = msgspec.field(name="epoch")
    at_iteration: int
    reason: str
    verdict: int | None = None


class PlanIssued(Control, frozen=True, kw_only=True, tag="plan_issued@1"):
    """`plan` is about to be sent to the ranks; it is in force from `PlanApplied` on. `watermark` as in `DeviceLost`.

    `optional`: a change that somebody chose, measured against the plan before it. `peak_bytes`: rank -> the most memory that it
    is predicted to need; nothing where sizes of layers are not known.
    """

    plan_version: int = msgspec.field(name="epoch")
    proposal: str
    optional: bool
    plan: dict[str, Any]
    watermark: int
    peak_bytes: dict[str, int] = msgspec.field(default_factory=dict)


class PlanApplied(Control, frozen=True, kw_only=True, tag="plan_applied@1"):
    """`plan` is in force from iteration `iteration` on (the initial plan has proposal ""); `watermark` as in `DeviceLost`."""

    plan_version: int = msgspec.field(name="epoch")
    digest: str
    proposal: str
    iteration: int
    reason: str
    plan: dict[str, Any]
    watermark: int | None = None


class PlanFailed(Control, frozen=True, kw_only=True, tag="plan_failed@1"):
    plan_version: int = msgspec.field(name="epoch")
    proposal: str
    reason: str


class PlanScored(Control, frozen=True, kw_only=True, tag="plan_scored@1"):
    """The effect of a change: predicted(old plan, estimated speeds, these batches) minus measured, per iteration.

    `interval_s` is the 95 % interval of the mean effect; None with `void` set when the fault ended or another plan came first.
    """

    plan_version: int = msgspec.field(name="epoch")
    proposal: str
    from_iteration: int
    to_iteration: int
    n: int
    predicted_s: float | None = None
    baseline_s: float | None = None
    measured_s: float | None = None
    effect_s: float | None = None
    interval_s: tuple[float, float] | None = None
    void: str | None = None
