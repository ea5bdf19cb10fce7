"""What happened at which iteration: the marks that every chart over iterations shares."""

from __future__ import annotations

from typing import Literal

import msgspec

from unskew.analytics.core.run_state import RunState
from unskew.collector.events import FaultInjected
from unskew.dashboard.wording import CAUSES, culprits


class Mark(msgspec.Struct, frozen=True):
    """An event of the log at an iteration; `short` fits beside a symbol, `text` is a sentence."""

    kind: Literal["fault", "verdict", "plan"]
    iteration: int
    short: str
    text: str


def marks(state: RunState) -> tuple[Mark, ...]:
    """Injected faults and their ends, verdicts and their ends, plans after the first; in the order of iterations."""
    found: list[Mark] = []
    for fault in state.faults:
        found.append(Mark("fault", fault.at_iteration, f"rank {fault.rank}", f"fault injected: {_fault(fault)}"))
        if fault.until_iteration is not None:
            found.append(Mark("fault", fault.until_iteration, "", f"fault ended: {_fault(fault)}"))
    for judged in state.verdicts.values():
        who = culprits(judged.verdict)
        for verdict in (revision.verdict for revision in judged.revisions):
            found.append(Mark("verdict", verdict.at_iteration, who, f"verdict: {who}, {CAUSES[verdict.cause]}"))
        if judged.closed is not None:
            found.append(Mark("verdict", judged.closed.at_iteration, "", f"verdict closed: {who}, {judged.closed.reason}"))
    for plan in (applied.event for applied in state.plans[1:]):
        found.append(
            Mark("plan", plan.iteration, f"plan {plan.plan_version}", f"plan {plan.plan_version} in force: {plan.reason}")
        )
    return tuple(sorted(found, key=lambda mark: mark.iteration))


def _fault(fault: FaultInjected) -> str:
    factor = f" ×{fault.factor:g}" if fault.factor is not None else ""
    phase = f" in {fault.phase}" if fault.phase else ""
    peer = f" to {fault.peer}" if fault.peer is not None else ""
    return f"{fault.kind}{factor}{phase}, rank {fault.rank}{peer}"
