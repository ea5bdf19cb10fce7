"""FT-HSDP's rules under deaths at any moment: one state within a replica, behind or equal between them, each batch once."""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.scheduler.quorum import Quorum, QuorumOptions, QuorumState, Standing, StateLost, decide
from unskew.analytics.scheduler.replicas import replicas_of, returning, trained, with_replicas

STAGES, STEPS = 2, 6
Step = frozenset[tuple[int, int]]
"""What a step's update is made of: (replica, place in its stream)."""


class Replica:
    """A replica as runtime/replicas/rank.py has it, without tensors: a rank's state is the updates that it is made of."""

    def __init__(self, number: int, replicas: int, *, current: bool) -> None:
        self.number, self.current, self.alive = number, current, True
        self.states: list[tuple[Step, ...]] = [()] * STAGES
        self.positions = (0,) * replicas
        self.inbox: deque = deque()
        self.outbox: deque = deque()
        self.plans: dict[int, bool] = {}  # version -> takes effect at once
        self.quorums: dict[tuple[int, int], Quorum] = {}
        self.acted, self.least, self.proposed = (-1, -1), -1, -1
        self.at: Quorum | None = None
        self.entered = False
        self.results: list[bool | None] = []
        self.fetched: list[tuple[tuple[Step, ...], tuple[int, ...]] | None] = []

    @property
    def stepped(self) -> int:
        return len(self.states[0])

    @property
    def abort(self) -> int:
        return max((version for version, abort in self.plans.items() if abort), default=-1)

    @property
    def holds(self) -> bool:
        return self.current and self.at is not None and self.stepped == self.at.iteration

    def propose(self, version: int, iteration: int, *, ahead: bool) -> None:
        self.proposed = version
        current = self.current and (not ahead or self.stepped == iteration - 1)
        self.outbox.append(
            Standing(plan_version=version, iteration=iteration, attempt=0, current=current, ahead=ahead, at_s=0.0)
        )

    def usable(self) -> Quorum | None:
        if self.abort < self.least:
            return None
        places = [place for place in self.quorums if place > self.acted and place[0] >= self.abort]
        return self.quorums[min(places)] if places and self.abort <= self.proposed else None


class World:
    """Replicas, the controller, and messages on their way; `act` lets one thing happen that can happen now."""

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self.rng = rng
        self.first = uniform_plan(tp=1, pp=STAGES, dp=replicas, n_layers=STAGES, micro_batches=replicas)
        self.replicas = {number: Replica(number, replicas, current=True) for number in range(replicas)}
        self.plan, self.quorum = self.first, QuorumState()
        self.entered: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        self.over = ""
        self.issue(self.first, abort=True)

    def issue(self, plan: Plan, *, abort: bool) -> None:
        self.plan = plan
        self.quorum = self.quorum.issued(plan, abort=abort)
        for replica in self.replicas.values():
            if replica.number in replicas_of(plan):
                replica.inbox.append((plan.plan_version, abort))

    def living(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.alive]

    def kill(self) -> None:
        """Any rank, at any moment: its replica is out."""
        victim = self.rng.choice(self.living())
        victim.alive = False
        left = {*replicas_of(self.plan)} - {victim.number}
        try:
            self.issue(with_replicas(self.first, left, self.plan.plan_version + 1), abort=True)
        except PlanError:
            self.over = "no replica is left"

    def revive(self) -> None:
        if self.quorum.coming is not None:
            return
        ready = {role.rank for role in self.first.roles}
        if back := returning(self.first, self.plan, ready):
            plan = with_replicas(self.first, {*replicas_of(self.plan), back[0]}, self.plan.plan_version + 1)
            newcomer = self.replicas[back[0]] = Replica(back[0], len(self.replicas), current=False)
            self.issue(plan, abort=False)
            newcomer.acted = plan.plan_version, -1
            newcomer.propose(plan.plan_version, 0, ahead=False)

    def act(self) -> bool:
        """Whether anything could happen."""
        able = []
        for one in self.living():
            able += [(self.deliver, one)] if one.inbox else []
            able += [(self.hear, one)] if one.outbox else []
            if one.at is None:
                able += [(self.ask, one)] if one.abort > one.proposed else []
                able += [(self.begin, one)] if one.usable() else []
            else:
                able += [(self.enter, one)] if not one.entered and one.at.iteration < STEPS else []
                able += [(self.fetch, one)] if not one.holds and None in one.fetched else []
                able += [(self.exchange, one)] if one.entered and None in one.results and self.can_resolve(one) else []
                able += [(self.vote, one)] if self.can_vote(one) else []
        if not able:
            return False
        action, one = self.rng.choice(able)
        action(one)
        return True

    def deliver(self, one: Replica) -> None:
        message = one.inbox.popleft()
        if isinstance(message, Quorum):
            one.quorums[message.place] = message
        else:
            one.plans[message[0]] = message[1]

    def hear(self, one: Replica) -> None:
        """The controller hears a proposal and decides."""
        self.quorum = self.quorum.asked(one.number, one.outbox.popleft())
        found, reason = decide(0.0, self.quorum, QuorumOptions())
        if isinstance(found, StateLost):
            self.over = reason
        elif found is not None:
            self.quorum = self.quorum.answered(found)
            for member in (*found.healthy, *found.behind):
                self.replicas[member].inbox.append(found)

    def ask(self, one: Replica) -> None:
        one.propose(one.abort, one.stepped, ahead=False)

    def begin(self, one: Replica) -> None:
        quorum = one.at = one.usable()
        assert quorum is not None
        one.acted, one.entered = quorum.place, False
        one.results, one.fetched = [None] * STAGES, [None] * STAGES
        if quorum.iteration < STEPS:
            one.propose(quorum.plan_version, quorum.iteration + 1, ahead=True)
        if one.number in quorum.healthy:
            assert one.holds, "a replica that has no state was asked to contribute"

    def enter(self, one: Replica) -> None:
        assert one.at is not None
        one.entered = True
        self.entered.setdefault(one.at.place, {})[one.number] = one.positions if one.holds else ()

    def can_resolve(self, one: Replica) -> bool:
        assert one.at is not None
        return any(self.ends_of(one.at, one))

    def ends_of(self, quorum: Quorum, one: Replica) -> tuple[bool, bool]:
        """Whether an exchange can come through on a rank, and whether it can break: by a plan, or a neighbour that is gone."""
        members = {*quorum.healthy, *quorum.behind}
        gone = any(not self.replicas[member].alive for member in members)
        return self.entered[quorum.place].keys() >= members, one.abort > quorum.plan_version or gone

    def exchange(self, one: Replica) -> None:
        """On one rank the ring came through or broke: through only where everybody took part, broken only for a reason."""
        assert one.at is not None
        came, broke = self.ends_of(one.at, one)
        one.results[one.results.index(None)] = self.rng.random() < 0.5 if came and broke else came

    def fetch(self, one: Replica) -> None:
        """One rank's state comes, or it is too late for it, now or for ever."""
        assert one.at is not None
        source = self.replicas[one.at.sources[one.number]]
        stage = one.fetched.index(None)
        if source.alive and source.current and source.stepped == one.at.iteration:
            one.fetched[stage] = source.states[stage], source.positions

    def can_vote(self, one: Replica) -> bool:
        assert one.at is not None
        if one.at.iteration >= STEPS:
            return one.holds or None not in one.fetched or one.abort > one.at.plan_version
        return one.entered and None not in one.results

    def vote(self, one: Replica) -> None:
        quorum = one.at
        assert quorum is not None
        held = one.holds
        if (held or None not in one.fetched) and (quorum.iteration >= STEPS or all(one.results)):
            if not held:
                one.states = [fetched[0] for fetched in one.fetched if fetched is not None]
                one.positions = next(fetched[1] for fetched in one.fetched if fetched is not None)
                one.current = True
            if quorum.iteration < STEPS:
                seen = {positions for positions in self.entered[quorum.place].values() if positions}
                assert len(seen) == 1, "replicas that contribute disagree on what is trained"
                update = frozenset((replica, one.positions[replica]) for replica in quorum.healthy)
                one.states = [(*state, update) for state in one.states]
                one.positions = trained(one.positions, quorum.healthy)
        elif held:
            one.least = quorum.plan_version + 1
        one.at = None

    def check(self) -> None:
        for one in self.living():
            assert len({*one.states}) == 1, "two states within a replica"
            once = Counter(batch for update in one.states[0] for batch in update)
            assert set(once.values()) <= {1}, "a batch was trained twice"
            for replica, position in enumerate(one.positions):
                assert {place for number, place in once if number == replica} == set(range(position)), "a batch was left out"
        standing = sorted((one.states[0] for one in self.living() if one.current), key=len)
        for shorter, longer in pairwise(standing):
            assert longer[: len(shorter)] == shorter, "a replica is neither behind nor equal"


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@example(seed=5814, replicas=4, deaths=3)  # a replica returns, and its quorum was formed ahead of a step that then fails
@given(seed=st.integers(0, 2**32), replicas=st.integers(1, 4), deaths=st.integers(0, 4))
def test_whoever_dies_whenever_a_replica_is_equal_or_behind_and_each_batch_counts_once(
    seed: int, replicas: int, deaths: int
) -> None:
    rng = random.Random(seed)
    world = World(replicas, rng)
    for _ in range(deaths):
        for _ in range(rng.randrange(120)):
            if rng.random() < 0.05:
                world.revive()
            if not world.act():
                break
            world.check()
        if not world.over and world.living():
            world.kill()
    while not world.over and world.act():
        world.check()
    if not world.over:
        ends = {one.states[0] for one in world.living() if one.number in replicas_of(world.plan) and one.current}
        waiting = {one.number for one in world.living() if one.stepped < STEPS}
        # Who comes when there is nothing left to train stays outside.
        late = set(world.quorum.coming.replicas) - set(world.quorum.present.replicas) if world.quorum.coming else set()
        assert len(ends) == 1
        assert waiting <= late, "a replica waits for ever"


def standing(iteration: int, *, current: bool = True, ahead: bool = False) -> Standing:
    return Standing(plan_version=2, iteration=iteration, attempt=0, current=current, ahead=ahead, at_s=5.0)


def test_who_is_not_at_the_front_is_behind_and_the_sources_take_turns() -> None:
    plan = with_replicas(uniform_plan(tp=1, pp=1, dp=4, n_layers=1, micro_batches=4), range(4), 2)
    state = QuorumState().issued(plan, abort=True)
    for replica, one in enumerate((standing(9), standing(8), standing(9), standing(0, current=False))):
        state = state.asked(replica, one)
    quorum, reason = decide(5.5, state, QuorumOptions())
    assert isinstance(quorum, Quorum)
    assert (quorum.iteration, quorum.healthy, quorum.behind, quorum.fast) == (9, (0, 2), (1, 3), False)
    assert quorum.sources == {1: 2, 3: 0}
    assert (quorum.proposed, quorum.waited_s) == ({0: 9, 1: 8, 2: 9, 3: 0}, 0.5)
    assert reason == "iteration 9 is the front: 2 healthy, 2 behind, proposed anew"
    assert decide(5.5, state, QuorumOptions(least_healthy=3))[0] is None


def test_a_returning_replica_is_waited_for_by_nobody() -> None:
    first = uniform_plan(tp=1, pp=1, dp=2, n_layers=1, micro_batches=2)
    state = QuorumState().issued(with_replicas(first, {0}, 2), abort=True)
    state = state.issued(with_replicas(first, {0, 1}, 3), abort=False).asked(0, standing(4, ahead=True))
    alone, _ = decide(0.0, state, QuorumOptions())
    assert isinstance(alone, Quorum)
    assert (alone.plan_version, alone.healthy) == (2, (0,))
    state = state.answered(alone).asked(0, standing(5, ahead=True))
    newcomer = Standing(plan_version=3, iteration=0, attempt=0, current=False, ahead=False, at_s=0.0)
    both, _ = decide(0.0, state.asked(1, newcomer), QuorumOptions())
    assert isinstance(both, Quorum)
    assert (both.plan_version, both.iteration, both.healthy, both.behind, both.sources) == (3, 5, (0,), (1,), {1: 0})
