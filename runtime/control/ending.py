"""The last words of a run: done is only what its log can show."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from unskew.collector.events import RunFinished
from unskew.collector.log_gap import log_gap
from unskew.runtime.protocol import NodeFinished, RankFinished


def ending(
    status: Literal["done", "failed", "stopped"],
    reason: str,
    *,
    committed: int,
    reports: Collection[RankFinished],
    logged: Collection[int],
    last_logged: Mapping[int, int],
    node: NodeFinished,
    unwritten: int,
) -> RunFinished:
    """How the run ended, once everybody has written what the disk took.

    `committed`: iterations that some rank is known to have committed; `logged`: those that the log holds, `last_logged`: the
    last of each rank. A rank's lines come in order, so where its last iteration is there, what it reported as unwritten came
    later. `node`: the agent's report; `unwritten`: events of the controller's own.
    """
    late = [report for report in reports if last_logged.get(report.rank, -1) + 1 < report.committed]
    end = RunFinished(
        status=status,
        iterations=len(logged),
        reason=reason,
        committed=max(committed, len(logged)),
        unwritten=unwritten + node.unwritten + sum(report.unwritten for report in late),
    )
    gap = log_gap(None, end)
    if status != "done" or not gap:
        return end
    problems = [*(report.problem for report in late), node.problem]
    why = next((f" ({problem})" for problem in problems if problem), "")
    return msgspec.structs.replace(end, status="incomplete", reason=f"{gap}{why}")
