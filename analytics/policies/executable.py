"""Which policies `unskew run` can follow: what our ranks have no power for is refused by name."""

from __future__ import annotations

from unskew.analytics.policies.registry import POLICIES

NOT_EXECUTED = {
    "none": "a lost rank ends the job there, as with mode=observe",
    "checkpoint-restart": "a restart from the checkpoint is what when_stuck=wait does when nobody holds some layer",
    "recycle-staggered": "ranks step their optimisers together",
    "bamboo": "ranks execute no redundant forward pass and hold no layers of their neighbours",
    "strengthened-oobleck": "it is a baseline of studies: which micro-batches move depends on two planners in turn",
    "strengthened-recycle": "ranks step their optimisers together",
    "joint": "it forms groups anew as ranks cannot yet",
}
"""Policy -> why no run can follow it."""
FOLLOWED = tuple(name for name in POLICIES if name not in NOT_EXECUTED)
SCHEDULES = ("1f1b", "zb-h1")
"""The schedules that the published policies plan for."""


def refusal(name: str, *, schedule: str, by_replica: bool) -> str:
    """Why a run cannot follow the policy, in a sentence; "" where it can."""
    if name in NOT_EXECUTED:
        return f"policy={name} is simulated only: {NOT_EXECUTED[name]}"
    if name not in FOLLOWED:
        return f"policy={name} is not known, allowed: {', '.join(FOLLOWED)}"
    if name != "unskew" and schedule not in SCHEDULES:
        return f"policy={name} plans for {' and '.join(SCHEDULES)}, not for schedule={schedule}"
    if by_replica and name not in ("unskew", "ft-hsdp"):
        return f"policy={name} is not for recovery=ft-hsdp, by which replicas leave as a whole"
    return ""
