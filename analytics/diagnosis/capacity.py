"""Lost capacity: what a device that does nothing could have done, from when it was lost, or left over by the answer to a loss,
until it works again or the run ends."""

from __future__ import annotations

from collections.abc import Sequence

from unskew.analytics.diagnosis.runlog import RunLog
from unskew.collector.events import Verdict


def idle_s(log: RunLog, verdicts: Sequence[Verdict]) -> dict[str, float]:
    """cause -> device-seconds in which ranks that executed something under an earlier plan executed nothing.

    A lost rank idles for its own loss, one that lives for the loss or the slowness that the plan answers.
    """
    found: dict[str, float] = {}
    worked: set[int] = set()
    for plan_version, seconds in sorted(_seconds_under(log).items()):
        plan = log.plans[plan_version]
        worked |= plan.executors
        for rank in worked - plan.executors:
            cause = _cause(log, verdicts, rank, plan_version)
            found[cause] = found.get(cause, 0.0) + seconds
    return found


def _seconds_under(log: RunLog) -> dict[int, float]:
    """Plan version -> how long its committed iterations took together."""
    found: dict[int, float] = {}
    for released in log.released:
        committed = released.committed
        found[committed.plan_version] = found.get(committed.plan_version, 0.0) + committed.measured_us / 1e6
    return found


def _cause(log: RunLog, verdicts: Sequence[Verdict], rank: int, plan_version: int) -> str:
    lost = {loss.rank: "dead" if loss.how == "exit" else "hung" for loss in log.lost}
    present = log.plans[plan_version].ranks
    if rank in lost and rank not in present:
        return lost[rank]
    if any(party.rank == rank for verdict in verdicts if verdict.cause == "slow_device" for party in verdict.culprits):
        return "slow_device"
    gone = [how for other, how in lost.items() if other not in present]
    return gone[-1] if gone else "unexplained"
