"""What ranks share, a batch, a role, a stage, a link, is told from a slow device; seeds are fixed."""

import msgspec
import numpy as np
import pytest
from support.traces.noisy_chunks import COST, PP4_DP2, culprit, healthy, run, slow, train, watch

from unskew.analytics.core.iteration import Transfer
from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.detector.detector import Detector, DetectorOptions
from unskew.analytics.detector.options import SLEEPING
from unskew.analytics.detector.products import confirm, suspected_ranks
from unskew.analytics.detector.tracks import learn_noise
from unskew.collector.events import Verdict, VerdictClosed


def test_a_batch_heavier_than_predicted_accuses_nobody_who_shares_it() -> None:
    """As when long documents cost more than the model knows: all ranks of replica 0, or all ranks, take 1.5 times as long."""
    replica_0 = {role.rank for role in PP4_DP2.roles if role.replica == 0}
    assert run(lambda now, rank, _: 1.5 if now >= 20 and rank in replica_0 else 1.0, seed=5) == []
    assert run(lambda now, *_: 1.5 if now >= 20 else 1.0, seed=5) == []


@pytest.mark.slow
@pytest.mark.parametrize("misfit", [1.15, 1.2, 1.5])
@pytest.mark.parametrize(("factor", "within"), [(1.3, 10), (1.8, 5)])
def test_what_all_ranks_share_does_not_hide_a_slow_one(misfit: float, factor: float, within: int) -> None:
    named = 0
    for seed in range(8):
        fault = slow(seed, factor, at=50)
        verdicts = run(lambda *a, f=fault: f(*a) * (misfit if a[0] >= 10 else 1.0), seed=seed, n=50 + within)
        assert {culprit(v) for v in verdicts} <= {seed}
        named += bool(verdicts)
    assert named >= 7


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_the_learned_noise_is_that_of_the_ranks_and_not_what_they_share(n_ranks: int) -> None:
    """Residuals of sd 0.1 around a common 0.3 (two ranks cannot tell the two apart: there, around 0)."""
    random = np.random.default_rng(n_ranks)
    noise = np.array([np.nan])
    learned = []
    for _ in range(400):
        noise = learn_noise(noise, random.normal(0.3 if n_ranks > 2 else 0.0, 0.1, (n_ranks, 1)), None, DetectorOptions())
        learned.append(noise[0])
    assert 0.07 < np.mean(learned[50:]) < 0.13


def test_a_role_dearer_than_predicted_accuses_nobody_who_plays_it() -> None:
    stage_0 = {role.rank for role in PP4_DP2.roles if role.stage == 0}
    assert run(lambda _, rank, __: 1.4 if rank in stage_0 else 1.0, seed=5, n=120) == []


def test_both_ranks_of_a_role_slowed_at_once_are_named_for_their_own_past_speaks_against_them() -> None:
    stage_0 = {role.rank for role in PP4_DP2.roles if role.stage == 0}
    verdicts = run(lambda now, rank, _: 1.3 if now >= 40 and rank in stage_0 else 1.0, seed=5)
    assert {culprit(v) for v in verdicts} == stage_0


def test_belief_survives_a_plan_change_and_moved_layers_accuse_nobody() -> None:
    """Rank 3 is slow and gives up layers; on other layers the model is 8 % off for everybody; later rank 3 recovers."""
    moved = plan_from_partition(
        plan_version=1,
        n_layers=16,
        schedule="1f1b",
        members=[range(4), range(4, 8)],
        layers=[[5, 5, 4, 2], [4, 4, 4, 4]],
        micro_batches=[3, 5],
    )
    fault = slow(3, 1.8, at=20, until=80)
    detector = Detector()
    before = watch(detector, train(PP4_DP2, fault, seed=6, n=40), PP4_DP2)
    misfit = {0: 1.08, 1: 1.08, 3: 0.93}
    after = train(moved, lambda now, rank, kind: fault(now, rank, kind) * misfit.get(rank, 1.0), seed=6, n=70, first=40)
    verdicts = watch(detector, after, moved)
    assert [culprit(v) for v in before] == [3]
    assert {culprit(v) for v in verdicts[:-1]} <= {3}
    assert isinstance(verdicts[-1], VerdictClosed)
    assert 80 <= verdicts[-1].at_iteration <= 88
    assert detector.speeds == {}


@pytest.mark.parametrize("until", [100, 10**6])
def test_two_ranks_of_a_stage_that_were_slow_are_no_cost_of_its_new_layers(until: int) -> None:
    """Both give up layers; what they show on the others was learned as what these cost, and they were called healthy again.
    They heal when they do."""
    moved = plan_from_partition(
        plan_version=1, n_layers=16, schedule="1f1b", members=[range(4), range(4, 8)], layers=[[7, 1, 4, 4]] * 2,
        micro_batches=[4, 4],
    )  # fmt: skip
    detector = Detector()

    def both(now: int, rank: int, _kind: str) -> float:
        return 2.0 if rank in (1, 5) and 20 <= now < until else 1.0

    named = watch(detector, train(PP4_DP2, both, seed=6, n=40), PP4_DP2)
    assert {culprit(one) for one in named} == {1, 5}
    later = watch(detector, train(moved, both, seed=6, n=100, first=40), moved)
    ends = {one.verdict: one.at_iteration for one in later if isinstance(one, VerdictClosed)}
    numbers = {culprit(one): one.verdict for one in named}
    still = {rank: detector.speeds[rank]["F"] for rank in (1, 5) if rank in detector.speeds}
    if until > 140:
        assert not {*numbers.values()} & ends.keys()
        assert still == {rank: pytest.approx(0.5, rel=0.1) for rank in (1, 5)}
    else:
        assert all(until <= ends[numbers[rank]] <= until + 8 for rank in (1, 5))
        assert still == {}


@pytest.mark.parametrize("at", [2, 5, 12, 19])
def test_a_stage_that_turns_slow_while_its_cost_is_learned_is_as_slow_as_it_is(at: int) -> None:
    """Half as fast from iteration 12 on it was named at 0.7 of its speed: the rest was taken for the cost of its layers."""
    detector = Detector()
    later = train(PP4_DP2, lambda now, rank, _: 2.0 if rank in (1, 5) and now >= at else 1.0, seed=6, n=40)
    assert {culprit(one) for one in watch(detector, later, PP4_DP2)} == {1, 5}
    assert {rank: kinds["F"] for rank, kinds in detector.speeds.items()} == {
        rank: pytest.approx(0.5, rel=0.06) for rank in (1, 5)
    }


def test_what_a_probe_measures_of_a_rank_is_no_cost_of_its_role() -> None:
    """Slow from its second iteration on a stage is taken for a dear one; a probe of rank 1 says that it is not, and the rank,
    whose times are what its role was said to cost, was called healthy again after four iterations."""
    detector = Detector()
    iterations = [*train(PP4_DP2, lambda now, rank, _: 2.0 if rank in (1, 5) and now >= 1 else 1.0, seed=6, n=80)]
    assert watch(detector, iterations[:40], PP4_DP2) == []
    detector.state, (verdict,) = confirm(detector.state, 1, 2.0, 39, detector.options)
    assert isinstance(verdict, Verdict)
    assert culprit(verdict) == 1
    assert not any(isinstance(one, VerdictClosed) for one in watch(detector, iterations[40:], PP4_DP2))
    assert detector.speeds[1]["F"] == pytest.approx(0.5, rel=0.1)


def test_what_only_the_company_excuses_is_doubted_and_a_probe_confirms_it() -> None:
    """All of replica 0 turn slow at once: as a dear batch would look. A probe says that rank 2 really is."""
    replica_0 = {role.rank for role in PP4_DP2.roles if role.replica == 0}
    detector = Detector()
    slowed = train(PP4_DP2, lambda now, rank, _: 1.3 if now >= 30 and rank in replica_0 else 1.0, seed=5, n=45)
    assert watch(detector, slowed, PP4_DP2) == []
    assert suspected_ranks(detector.state, detector.options).keys() == replica_0
    state, (verdict,) = confirm(detector.state, 2, 1.3, 45, detector.options)
    assert culprit(verdict) == 2
    assert state.speeds == {2: {kind: pytest.approx(1 / 1.3) for kind in "FB"}}
    assert suspected_ranks(state, detector.options).keys() == replica_0 - {2}
    assert confirm(detector.state, 2, 1.02, 45, detector.options) == (detector.state, ())


def test_a_slow_link_is_named_and_taken_back_where_links_are_watched() -> None:
    """Messages of rank 1 to rank 2 take four times as long from iteration 20 to 39."""
    detector, sleeping = Detector(), Detector(SLEEPING)
    pairs = [(a, b) for replica in (0, 4) for a, b in ((replica + s, replica + s + 1) for s in range(3))]
    random = np.random.default_rng(3)
    found: list[Verdict | VerdictClosed] = []
    for one in train(PP4_DP2, healthy, seed=13, n=60):
        slowed = {(1, 2): 4.0} if 20 <= one.iteration < 40 else {}
        times = [
            (a, b, 4_000 * slowed.get((a, b), 1.0) * float(np.exp(random.normal(0, 0.1)))) for a, b in pairs for _ in range(4)
        ]
        seen = msgspec.structs.replace(one, transfers=tuple(Transfer(*time) for time in times))
        found += detector.observe(seen, PP4_DP2, COST).verdicts
        assert sleeping.observe(seen, PP4_DP2, COST).verdicts == ()
    named, closed = found
    assert isinstance(named, Verdict)
    assert isinstance(closed, VerdictClosed)
    assert (named.cause, named.culprits[0].link, closed.verdict) == ("slow_link", (1, 2), named.verdict)
    assert abs(named.since_iteration - 20) <= 2
    assert abs(closed.until_iteration - 40) <= 2


def test_a_stage_that_becomes_dearer_on_all_of_its_ranks_is_named_and_none_of_them() -> None:
    plan = uniform_plan(tp=1, pp=2, dp=4, n_layers=8, micro_batches=16)
    stage_1 = {role.rank for role in plan.roles if role.stage == 1}
    named, closed = run(lambda now, rank, _: 1.3 if 40 <= now < 70 and rank in stage_1 else 1.0, seed=14, n=90, plan=plan)
    assert isinstance(named, Verdict)
    assert isinstance(closed, VerdictClosed)
    assert (named.cause, [party.stage for party in named.culprits]) == ("stage_imbalance", [1])
    assert abs(named.since_iteration - 40) <= 2
    assert named.evidence["time_ratio"] == pytest.approx(1.3, abs=0.05)
    assert abs(closed.until_iteration - 70) <= 2
    assert run(healthy, seed=15, n=150, plan=plan) == []
    (mild,) = run(lambda now, rank, _: 1.12 if now >= 40 and rank in stage_1 else 1.0, seed=16, n=120, plan=plan)
    assert mild.verdict == 1  # and it is not taken for a habit
