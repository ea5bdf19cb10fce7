"""Who is stuck: ranks that hang or are frozen, communication that broke although nobody died, a run in which nothing moves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from unskew.analytics.health.liveness import STOPPED, LivenessOptions, RankLiveness, Suspect, decide

_BROKEN_S = 1.0
_UNHEARD_S = 10.0
"""For so long the news of a death may be on its way: to a busy node's zygote, and from it."""
STANDSTILL_S = 60.0
_BREAKS_IN_A_ROW = 5


class _KillOrder(msgspec.Struct, frozen=True):
    suspect: Suspect
    since_s: float


class LivenessWatch:
    """State of the controller's watch; times are its monotonic clock.

    A rank whose communication broke waits for a plan record that aborts. When a death explains the break, that record is on
    its way. When none does within a second, and every rank has beaten in the last half of it, the same plan is issued again
    under a new number, at most five times without a commit. Who has not beaten since may be who died: a process that ends on a
    busy machine takes seconds.
    """

    def __init__(self) -> None:
        self._condemned: dict[int, _KillOrder] = {}
        self._spared: dict[int, _KillOrder] = {}
        self._broken_since_s: float | None = None
        self._newest_abort = 0
        self._in_a_row = 0
        self._looks_since_s: float | None = None

    def suspects(
        self, now_s: float, statuses: Mapping[int, RankLiveness], longest_work_s: float | None, *, spare: bool = True
    ) -> tuple[Suspect, ...]:
        """Ranks that hang and are to be killed, and ranks that are frozen and may go on, each named once; without `spare` they
        are to be killed, too.

        `longest_work_s`: the longest stretch of work that has ended, None before the first iteration is committed.
        """
        table = {rank: status for rank, status in statuses.items() if rank not in self._condemned.keys() | self._spared.keys()}
        options = LivenessOptions() if longest_work_s is None else LivenessOptions().learned(longest_work_s)
        found = decide(now_s, table, options)[0]
        for suspect in found:
            (self._spared if spare and suspect.how == "frozen" else self._condemned)[suspect.rank] = _KillOrder(suspect, now_s)
        return found

    def spare(self, suspect: Suspect, now_s: float) -> None:
        """A rank that the controller before lost while its process was there: it may go on still."""
        self._spared[suspect.rank] = _KillOrder(suspect, now_s)

    def returned(self, statuses: Mapping[int, RankLiveness]) -> tuple[int, ...]:
        """Ranks that were frozen and beat again, each named once."""
        found = [
            rank
            for rank in self._spared
            if rank in statuses
            and statuses[rank].heartbeat_age_s < LivenessOptions().stopped_s
            and statuses[rank].process_state != STOPPED
        ]
        for rank in found:
            del self._spared[rank]
        return tuple(found)

    def overdue(self, now_s: float, alive: Collection[int]) -> tuple[int, ...]:
        """Ranks that have been frozen for too long, each named once; one that is not lost yet will be by its end."""
        found = [rank for rank, frozen in self._spared.items() if now_s - frozen.since_s >= LivenessOptions().spared_s]
        for rank in found:
            frozen = self._spared.pop(rank)
            if rank in alive:
                self._condemned[rank] = _KillOrder(frozen.suspect, now_s)
        return tuple(found)

    def gone(self, rank: int) -> None:
        """The process of a rank has ended."""
        self._spared.pop(rank, None)

    def unkillable(self, now_s: float) -> tuple[Suspect, ...]:
        """Ranks that were to be killed and whose processes do not end, each named once: they are lost as they are."""
        found = []
        for rank, condemned in list(self._condemned.items()):
            if now_s - condemned.since_s >= LivenessOptions().stuck_s:
                suspect = self._condemned.pop(rank).suspect
                detail = f"{suspect.detail}; SIGKILL has not ended its process yet, so it is cut off"
                found.append(msgspec.structs.replace(suspect, detail=detail))
        return tuple(found)

    def condemned(self, rank: int) -> Suspect | None:
        """Why a rank that has now ended was killed; None when it ended by itself."""
        self.gone(rank)
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
        if self._looks_since_s is None:  # who stood still before it looked may move yet, and so may who has just regrouped
            self._looks_since_s = now_s
        reason, looked_s = "", now_s - self._looks_since_s
        if self._broken_since_s is not None and self._nobody_died(self._broken_since_s, now_s, statuses.values()):
            reason = "communication broke although no rank died"
        elif statuses and looked_s >= STANDSTILL_S and all(one.stalled_s >= STANDSTILL_S for one in statuses.values()):
            reason = f"nothing has moved for {STANDSTILL_S:g} s and nobody can be named"
        if not reason:
            return None
        self._in_a_row, self._looks_since_s = self._in_a_row + 1, now_s
        return reason, self._in_a_row > _BREAKS_IN_A_ROW

    @staticmethod
    def _nobody_died(broken_s: float, now_s: float, statuses: Collection[RankLiveness]) -> bool:
        """Whether no death explains what broke at `broken_s`."""
        beaten = all(one.at_s - one.heartbeat_age_s >= broken_s + _BROKEN_S / 2 for one in statuses)
        return now_s - broken_s >= (_BROKEN_S if beaten else _UNHEARD_S)
