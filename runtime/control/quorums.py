"""FT-HSDP's quorum, the controller's side: what replicas propose comes in, who takes part in the next step goes out."""

from __future__ import annotations

import time

from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.quorum import Quorum, QuorumOptions, QuorumState, Standing, StateLost, decide
from unskew.collector.events import QuorumFormed
from unskew.runtime.protocol import QuorumProposal


class QuorumKeeper:
    """The proposals that no quorum has answered yet."""

    def __init__(self) -> None:
        self._state, self._options = QuorumState(), QuorumOptions()

    def issued(self, plan: Plan, *, abort: bool) -> None:
        """A plan is about to be sent to the ranks."""
        self._state = self._state.issued(plan, abort=abort)

    def take(self, proposal: QuorumProposal) -> Quorum | str | None:
        """With one more proposal: the quorum that it completes, None while others are missing, or why there can be none."""
        now_s = time.monotonic()
        standing = Standing(
            plan_version=proposal.plan_version,
            iteration=proposal.iteration,
            attempt=proposal.attempt,
            current=proposal.current,
            ahead=proposal.ahead,
            at_s=now_s,
        )
        self._state = self._state.asked(proposal.replica, standing)
        found, reason = decide(now_s, self._state, self._options)
        if isinstance(found, StateLost):
            return reason
        if found is not None:
            self._state = self._state.answered(found)
        return found


def formed(quorum: Quorum) -> QuorumFormed:
    """What the log has of a quorum."""
    replicas = tuple(sorted(quorum.proposed))
    return QuorumFormed(
        iteration=quorum.iteration,
        plan_version=quorum.plan_version,
        attempt=quorum.attempt,
        replicas=replicas,
        proposed=tuple(quorum.proposed[replica] for replica in replicas),
        states=tuple("healthy" if replica in quorum.healthy else "behind" for replica in replicas),
        sources=tuple(quorum.sources[replica] for replica in quorum.behind),
        fast=quorum.fast,
        waited_us=round(1e6 * quorum.waited_s),
    )
