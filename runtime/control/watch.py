"""Who is stuck: ranks that hang or are frozen, communication that broke although nobody died, a run in which nothing moves."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unskew.analytics.health.liveness import UNINTERRUPTIBLE, LivenessOptions, RankLiveness, Suspect, decide

_BROKEN_S = 1.0
STANDSTILL_S = 60.0
_BREAKS_IN_A_ROW = 5


class _KillOrder(msgspec.Struct, frozen=True):
    suspect: Suspect
    since_s: float


class LivenessWatch:
    """State of the controller's watch; times are its monotonic clock.

    A rank whose communication broke waits for a plan record that aborts. When a death explains the break, that record is on
    its way; when none does within a second, the same plan is issued again under a new number, at most five times without a
    commit.
    """

    def __init__(self) -> None:
        self._condemned: dict[int, _KillOrder] = {}
        self._broken_since_s: float | None = None
        self._newest_abort = 0
        self._in_a_row = 0

    def suspects(self, now_s: float, statuses: Mapping[int, RankLiveness], longest_work_s: float | None) -> tuple[Suspect, ...]:
        """Ranks to be killed because they hang or are frozen, each named once.

        `longest_work_s`: the longest stretch of work that has ended, None before the first iteration is committed.
        """
        table = {rank: status for rank, status in statuses.items() if rank not in self._condemned}
        options = LivenessOptions() if longest_work_s is None else LivenessOptions().learned(longest_work_s)
        found = decide(now_s, table, options)[0]
        self._condemned.update({suspect.rank: _KillOrder(suspect, now_s) for suspect in found})
        return found

    def unkillable(self, now_s: float, statuses: Mapping[int, RankLiveness]) -> tuple[Suspect, ...]:
        """Ranks that were to be killed and whose processes do not end, each named once: they are lost as they are."""
        options, found = LivenessOptions(), []
        for rank, condemned in list(self._condemned.items()):
            in_kernel = rank in statuses and statuses[rank].process_state == UNINTERRUPTIBLE
            if now_s - condemned.since_s >= (options.stuck_s if in_kernel else options.blind_s):
                suspect = self._condemned.pop(rank).suspect
                detail = f"{suspect.detail}; SIGKILL has not ended its process, so it is cut off"
                found.append(msgspec.structs.replace(suspect, detail=detail))
        return tuple(found)

    def condemned(self, rank: int) -> Suspect | None:
        """Why a rank that has now ended was killed; None when it ended by itself."""
        condemned = self._condemned.pop(rank, None)
        return condemned.suspect if condemned is not None else None

    def broken(self, plan_version: int, now_s: float) -> None:
        """A rank reports that its communication of `plan_version` broke; older reports are answered already."""
        if plan_version >= self._newest_abort and self._broken_since_s is None:
            self._broken_since_s = now_s

    def aborted(self, plan_version: int) -> None:
        """A plan record that aborts has been issued: it answers what was broken before."""
        self._newest_abort, self._broken_since_s = plan_version, None

    def progressed(self) -> None:
        """An iteration was committed."""
        self._in_a_row = 0

    def regroup_reason(self, now_s: float, statuses: Mapping[int, RankLiveness]) -> tuple[str, bool] | None:
        """(why the same plan should be issued again, whether that was tried too often); None when all is well."""
        reason = ""
        if self._broken_since_s is not None and now_s - self._broken_since_s >= _BROKEN_S:
            reason = "communication broke although no rank died"
        elif statuses and all(status.stalled_s >= STANDSTILL_S for status in statuses.values()):
            reason = f"nothing has moved for {STANDSTILL_S:g} s and nobody can be named"
        if not reason:
            return None
        self._in_a_row += 1
        return reason, self._in_a_row > _BREAKS_IN_A_ROW
