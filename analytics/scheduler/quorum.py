"""Who takes part in the next step, decided step by step (FT-HSDP, arXiv 2602.00277, section on quorum; FastQuorum).

Every replica of the plan proposes the step that it wants to run next. The highest one among those with a current state is the
front; who is there is healthy and contributes its batch. Everybody else is behind: it takes part with zero gradients, fetches
the state of the front from a healthy replica, and has caught up when that is there before the step ends. Sources are taken in
turn. A replica proposes step n + 1 while it computes step n (`ahead`), so in the usual case the quorum is there before it is
needed. A plan that is issued at once (a replica was lost) voids what was proposed before: all propose anew. One that a
replica is to return with begins as soon as that has proposed, and until then the others go on without it.

A replica may commit a step that another one does not: the next quorum finds the other behind. Two replicas never commit
different updates for one step and both go on, because there is one decider, and it forms a quorum from all who live.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.replicas import replicas_of


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's proposal, made under plan `plan_version`: to run `iteration` next, as its `attempt`-th try. `current`: it
    will have the state that the iteration begins with, if the one that it computes now is committed. `ahead`: it still computes
    that one."""

    plan_version: int
    iteration: int
    attempt: int
    current: bool
    ahead: bool
    at_s: float


class Quorum(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs `iteration` under `plan_version`: `healthy` replicas contribute, those `behind` take part with zeros; `sources`:
    whose state each of these fetches. `fast`: every proposal had come before it was needed."""

    plan_version: int
    iteration: int
    attempt: int
    healthy: tuple[int, ...]
    behind: tuple[int, ...] = ()
    sources: dict[int, int] = {}
    proposed: dict[int, int] = {}
    fast: bool = False
    waited_s: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """Quorums in the order in which they hold."""
        return self.plan_version, self.iteration


class StateLost(msgspec.Struct, frozen=True):
    """No replica of the plan has a current state any more."""


class QuorumOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`least_healthy`: with fewer replicas nothing is trained."""

    least_healthy: int = 1


class QuorumMembers(msgspec.Struct, frozen=True):
    """The replicas of a plan."""

    plan_version: int
    replicas: tuple[int, ...]


class QuorumState(msgspec.Struct, frozen=True, kw_only=True):
    """`present`: whose steps are decided on; `coming`: the plan that follows when the replicas that return with it have come;
    `proposals`: the newest of each replica that no quorum has answered yet."""

    present: QuorumMembers = QuorumMembers(-1, ())
    coming: QuorumMembers | None = None
    proposals: Mapping[int, Standing] = {}

    def issued(self, plan: Plan, *, abort: bool) -> QuorumState:
        """With one more plan that is sent to the ranks."""
        one = QuorumMembers(plan.plan_version, replicas_of(plan))
        return QuorumState(present=one) if abort else msgspec.structs.replace(self, coming=one)

    def asked(self, replica: int, standing: Standing) -> QuorumState:
        """With a proposal; one that was made before the present plan is void."""
        if standing.plan_version < self.present.plan_version:
            return self
        return msgspec.structs.replace(self, proposals={**self.proposals, replica: standing})

    def answered(self, quorum: Quorum) -> QuorumState:
        """With a quorum that is about to be sent."""
        entered = self.coming if self.coming and self.coming.plan_version == quorum.plan_version else None
        members = {*quorum.healthy, *quorum.behind}
        return QuorumState(
            present=entered or self.present,
            coming=None if entered else self.coming,
            proposals={replica: one for replica, one in self.proposals.items() if replica not in members},
        )


def decide(now_s: float, state: QuorumState, options: QuorumOptions) -> tuple[Quorum | StateLost | None, str]:
    """The next quorum and why it is this one; None and what it waits for. Who never proposes is for liveness to name.

    >>> one = Standing(plan_version=3, iteration=8, attempt=0, current=True, ahead=True, at_s=0.0)
    >>> state = QuorumState(present=QuorumMembers(3, (0, 1)), proposals={0: one})
    >>> decide(1.0, state, QuorumOptions())
    (None, 'replica 1 of plan 3 has not proposed a step')
    """
    for membership in filter(None, (state.coming, state.present)):
        proposals = {replica: state.proposals[replica] for replica in membership.replicas if replica in state.proposals}
        missing = [replica for replica in membership.replicas if replica not in proposals]
        if not missing:
            return _formed(now_s, membership, proposals, options)
    return None, f"replica {missing[0]} of plan {state.present.plan_version} has not proposed a step"


def _formed(
    now_s: float, membership: QuorumMembers, proposals: Mapping[int, Standing], options: QuorumOptions
) -> tuple[Quorum | StateLost | None, str]:
    current = [one.iteration for one in proposals.values() if one.current]
    if not current:
        return StateLost(), f"no replica of plan {membership.plan_version} has a current state: a checkpoint is needed to go on"
    front = max(current)
    healthy = tuple(sorted(replica for replica, one in proposals.items() if one.current and one.iteration == front))
    behind = tuple(sorted(proposals.keys() - {*healthy}))
    if len(healthy) < options.least_healthy:
        return None, f"{len(healthy)} of at least {options.least_healthy} replicas are healthy"
    fast = all(one.ahead for one in proposals.values())
    quorum = Quorum(
        plan_version=membership.plan_version,
        iteration=front,
        attempt=max(proposals[replica].attempt for replica in healthy),
        healthy=healthy,
        behind=behind,
        sources={replica: healthy[(front + place) % len(healthy)] for place, replica in enumerate(behind)},
        proposed={replica: one.iteration for replica, one in sorted(proposals.items())},
        fast=fast,
        waited_s=now_s - min(one.at_s for one in proposals.values()),
    )
    text = f"iteration {front} is the front: {len(healthy)} healthy, {len(behind)} behind"
    return quorum, f"{text}, {'proposed ahead' if fast else 'proposed anew'}"
