"""The commit rule against every interleaving of iterating, dying and recovering that hypothesis can think of."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from unskew.runtime.rank.commit import CommitOutcome, CommitStanding, decide

pytestmark = pytest.mark.slow


@dataclass
class Member:
    """One rank as rank.py keeps it, and what it did: `steps` are the iterations whose gradients it applied."""

    stepped: int = 0
    attempt: int = -1
    outcome: CommitOutcome | None = None
    place: str = "idle"
    gradients_of: int | None = None
    steps: list[int] = field(default_factory=list)
    begun: set[tuple[int, int]] = field(default_factory=set)
    alive: bool = True

    def step(self) -> None:
        assert self.outcome is not None
        assert self.gradients_of == self.outcome.iteration == self.stepped
        self.steps.append(self.stepped)
        self.stepped, self.attempt, self.place = self.stepped + 1, -1, "idle"


class Protocol(RuleBasedStateMachine):
    """Up to four ranks; gradients and barrier need every member of the epoch, a dead one included: what it sent, it sent."""

    @initialize(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        self.members = [Member() for _ in range(count)]
        self.broken = False
        self.plan_version = 0

    @precondition(lambda self: not self.broken)
    @rule(order=st.lists(st.integers(0, 3), min_size=1, max_size=40))
    def advance(self, order: list[int]) -> None:
        """Ranks do what they can do next, in this order."""
        for number in order:
            member = self.members[number % len(self.members)]
            if not self.can_advance(member):
                continue
            if member.place == "idle":
                member.attempt, member.place, member.gradients_of = max(member.attempt, 0), "computing", None
                member.begun.add((member.stepped, member.attempt))
            elif member.place == "computing":
                member.place, member.gradients_of = "at the barrier", member.stepped
            elif member.place == "at the barrier":
                member.place, member.outcome = "passed", self.outcome(member.stepped, member.attempt)
            else:
                member.step()

    def can_advance(self, member: Member) -> bool:
        if member.place == "computing":  # gradients are reduced with everybody
            return all(self.has_reached(other, member.stepped, "computing") for other in self.members)
        return member.place != "at the barrier" or all(
            self.has_reached(other, member.stepped, "at the barrier") for other in self.members
        )

    @staticmethod
    def has_reached(member: Member, iteration: int, place: str) -> bool:
        order = ["idle", "computing", "at the barrier", "passed"]
        return (member.stepped, order.index(member.place)) >= (iteration, order.index(place))

    def outcome(self, iteration: int, attempt: int) -> CommitOutcome:
        return CommitOutcome(
            iteration=iteration,
            plan_version=self.plan_version,
            attempt=attempt,
            loss=1.0,
            next_plan_version=0,
            log_complete=True,
            clock_us=0,
        )

    @precondition(lambda self: sum(member.alive for member in self.members) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """kill -9, at any moment, also during a recovery."""
        data.draw(st.sampled_from([member for member in self.members if member.alive])).alive = False
        self.broken = True

    @precondition(lambda self: self.broken)
    @rule(data=st.data(), whole=st.booleans())
    def recover(self, data: st.DataObject, whole: bool) -> None:
        """The survivors settle; when another dies meanwhile only some of them hear the result, and they settle again."""
        survivors = [member for member in self.members if member.alive]
        settled = decide([CommitStanding(stepped=m.stepped, attempt=m.attempt, outcome=m.outcome) for m in survivors])
        # What one of them knows to count, counts; nothing else does.
        assert settled.committed == max(m.stepped + (m.place == "passed") for m in survivors)
        for member in survivors:
            if not whole and not data.draw(st.booleans()):
                continue
            assert member.stepped in (settled.committed, settled.committed - 1)
            if member.stepped < settled.committed:
                assert settled.outcome is not None
                member.outcome = settled.outcome
                member.step()
            member.attempt, member.place = settled.attempt, "idle"
        if whole:
            self.plan_version += 1
            assert {member.stepped for member in survivors} == {settled.committed}
            assert all((settled.committed, settled.attempt) not in member.begun for member in survivors)
            self.members, self.broken = survivors, False

    @invariant()
    def nobody_skips_or_doubles_a_step(self) -> None:
        for member in getattr(self, "members", []):
            assert member.steps == list(range(member.stepped))


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=300, stateful_step_count=20, deadline=None)
