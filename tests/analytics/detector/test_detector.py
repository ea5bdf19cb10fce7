"""The fail-slow Detector on simulated chunk times: who is named, when, how often, and with which speed; seeds are fixed."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.held_bytes import held_bytes
from support.traces.noisy_chunks import COST, PP2, PP4_DP2, culprit, healthy, run, slow, train, watch

from unskew.analytics.core.iteration import Transfer
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.detector import Detector, DetectorOptions, DetectorState, lose, sight_of, step
from unskew.analytics.detector.options import SHARED_MACHINE
from unskew.analytics.diagnosis.failslow import settled
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.predictor.fit import fit
from unskew.collector.events import Verdict, VerdictClosed


@pytest.mark.slow
def test_no_device_is_accused_in_twenty_healthy_runs_with_a_fitted_predictor() -> None:
    for seed in range(20):
        committed = list(train(PP4_DP2, healthy, seed=seed, n=200, cv=0.02 + 0.0005 * seed))
        fitted = fit([chunk for one in committed[:10] for chunk in one.chunks])
        assert watch(Detector(), iter(committed[10:]), PP4_DP2, fitted.model) == []


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "within", "least"), [(1.3, 10, 19), (1.8, 5, 20)])
def test_the_slow_rank_is_named_in_time_with_its_speed_and_its_end(factor: float, within: int, least: int) -> None:
    named = 0
    for seed in range(20):
        rank = seed % 8
        verdicts = run(slow(rank, factor, at=30, until=50), seed=seed, n=60)
        assert all(culprit(v) == rank for v in verdicts if isinstance(v, Verdict))
        first = verdicts[0]
        assert isinstance(first, Verdict)
        assert abs(first.since_iteration - 30) <= 2
        assert set(first.speed) == {"F", "B"}
        assert all(speed == pytest.approx(1 / factor, rel=0.06) for speed in first.speed.values())
        closed = verdicts[-1]
        assert isinstance(closed, VerdictClosed)
        assert abs(closed.until_iteration - 50) <= 2
        assert closed.at_iteration < 60
        named += first.at_iteration < 30 + within
    assert named >= least


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PP4_DP2, PP2], ids=["PP4xDP2", "PP2"])
def test_the_noise_of_shared_cores_neither_accuses_nor_hides(plan: Plan) -> None:
    for seed in range(4):
        assert run(healthy, seed=seed, n=150, plan=plan, cv=0.09) == []
        verdicts = run(slow(1, 1.3, at=30), seed=seed, n=45, plan=plan, cv=0.07)
        assert verdicts
        assert {culprit(v) for v in verdicts} == {1}


PP1 = uniform_plan(tp=1, pp=1, dp=1, n_layers=4, micro_batches=4)


@pytest.mark.parametrize(
    ("options", "factor", "within"), [(DetectorOptions(), 1.2, 8), (DetectorOptions(), 2.0, 8), (SHARED_MACHINE, 2.0, 20)]
)
def test_a_rank_that_works_alone_is_named_and_its_end_is_seen(options: DetectorOptions, factor: float, within: int) -> None:
    """Its slowness was learned as its noise, as it differs from nobody: it was never named."""
    for seed in range(3):
        assert watch(Detector(options), train(PP1, healthy, seed=seed, n=80), PP1) == []
        named, closed = watch(Detector(options), train(PP1, slow(0, factor, at=30, until=60), seed=seed, n=90), PP1)
        assert isinstance(named, Verdict)
        assert culprit(named) == 0
        assert abs(named.since_iteration - 30) <= 2
        assert named.at_iteration < 30 + within
        assert named.speed["F"] == pytest.approx(1 / factor, rel=0.06)
        assert isinstance(closed, VerdictClosed)
        assert abs(closed.until_iteration - 60) <= 2


@pytest.mark.parametrize("kind", ["F", "B"])
def test_slow_in_one_kind_of_work_is_said_of_this_kind_alone(kind: str) -> None:
    (verdict,) = run(slow(5, 1.8, at=30, kinds=kind), n=60)
    assert isinstance(verdict, Verdict)
    assert verdict.speed == {kind: pytest.approx(1 / 1.8, rel=0.06)}
    assert ("forward" if kind == "F" else "backward") in verdict.sentence


def test_a_further_slowdown_revises_the_verdict_under_its_number() -> None:
    detector = Detector()
    factors = slow(3, 1.3, at=20, until=40), slow(3, 1.8, at=40)
    verdicts = watch(detector, train(PP4_DP2, lambda *a: factors[0](*a) * factors[1](*a), seed=3, n=60), PP4_DP2)
    assert [(v.verdict, culprit(v)) for v in verdicts] == [(1, 3), (1, 3)]
    assert detector.speeds == {3: {kind: pytest.approx(1 / 1.8, rel=0.06) for kind in "FB"}}
    assert isinstance(verdicts[1], Verdict)
    assert abs(verdicts[1].since_iteration - 40) <= 2


def test_a_rank_slow_from_the_first_iteration_is_named() -> None:
    committed = list(train(PP4_DP2, slow(2, 1.5, at=0), seed=4, n=20))
    fitted = fit([chunk for one in committed[:10] for chunk in one.chunks])
    verdicts = watch(Detector(), iter(committed[10:]), PP4_DP2, fitted.model)
    assert [culprit(v) for v in verdicts] == [2]


@pytest.mark.parametrize("plan", [uniform_plan(tp=1, pp=1, dp=4, n_layers=8, micro_batches=16), PP4_DP2], ids=["dp4", "pp4dp2"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_slowness_is_dated_to_the_first_iteration_that_it_took_part_in(plan: Plan, at: int) -> None:
    for seed in range(5):
        (verdict,) = run(slow(2, 1.6, at=at), seed=seed, n=15, plan=plan)
        assert isinstance(verdict, Verdict)
        assert culprit(verdict) == 2
        assert abs(verdict.since_iteration - at) <= (at > 0)


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(1.5, 1.5), (1.4, 1.8)])
@pytest.mark.parametrize("at", [0, 12, 40])
def test_two_slow_ranks_of_four_are_each_named_in_time_with_a_speed_of_their_own(factors: tuple[float, float], at: int) -> None:
    """Half of a role is slow: what the other half shows is the role's, and neither their cost nor their noise is shared."""
    plan = uniform_plan(tp=1, pp=1, dp=4, n_layers=8, micro_batches=16)
    for seed in range(4):
        both = slow(1, factors[0], at), slow(3, factors[1], at)
        verdicts = run(lambda *a, both=both: both[0](*a) * both[1](*a), seed=seed, n=at + 12, plan=plan)
        assert sorted(culprit(verdict) or 0 for verdict in verdicts) == [1, 3]
        for verdict in verdicts:
            assert isinstance(verdict, Verdict)
            assert abs(verdict.since_iteration - at) <= 1
            assert verdict.at_iteration <= at + 6
            assert verdict.speed["F"] == pytest.approx(
                1 / factors[culprit(verdict) == 3], rel=0.12 if at else 0.16
            )  # at 0 its own pace is not known


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(10, 30), st.integers(6, 25), st.sampled_from([1.3, 1.8])), min_size=2, max_size=4),
)
def test_each_time_a_device_is_slow_has_a_number_an_onset_and_an_end(seed: int, times: list[tuple[int, int, float]]) -> None:
    at, episodes = 15, []
    for gap, length, factor in times:
        episodes.append((at + gap, at + gap + length, factor))
        at += gap + length

    def factor_of(now: int, rank: int, _kind: str) -> float:
        return next((f for since, until, f in episodes if rank == 1 and since <= now < until), 1.0)

    found = settled(run(factor_of, seed=seed, n=at + 15, cv=0.02, spikes=0.0))
    assert [verdict.verdict for verdict in found] == [*range(1, len(episodes) + 1)]
    for verdict, (since, until, _) in zip(found, episodes, strict=True):
        assert verdict.until_iteration is not None
        assert abs(verdict.since_iteration - since) <= 1
        assert abs(verdict.until_iteration - until) <= 1


def test_a_revision_says_since_when_the_device_has_been_slow() -> None:
    """Of a ramp to x4 the headline said that it was slow since its last step."""
    found = run(lambda now, rank, _: 1.0 if rank != 1 or now < 20 else 1.3 if now < 40 else 2.0, cv=0.02, spikes=0.0)
    first, last = (one for one in found if isinstance(one, Verdict))
    assert (first.verdict, first.since_iteration, last.since_iteration) == (last.verdict, 20, 40)
    assert first.sentence.endswith("since iteration 20")
    assert last.sentence.endswith("since iteration 40, and has been slow since iteration 20")


def test_an_iteration_is_judged_once_and_in_order() -> None:
    detector = Detector()
    one, two = train(PP4_DP2, healthy, seed=8, n=2)
    detector.observe(two, PP4_DP2, COST)
    with pytest.raises(ValueError, match="iteration 0 after iteration 1"):
        detector.observe(one, PP4_DP2, COST)


def test_a_lost_rank_gets_its_verdict_and_closes_what_was_open_against_it() -> None:
    detector = Detector()
    (open_verdict,) = watch(detector, train(PP4_DP2, slow(6, 1.8, at=10), seed=9, n=20), PP4_DP2)
    suspect = Suspect(rank=6, how="exit", detail="signal 9", victims=(5, 7))
    state, (dead, closed) = lose(detector.state, suspect, 20, detector.options)
    assert isinstance(dead, Verdict)
    assert isinstance(closed, VerdictClosed)
    assert (dead.cause, dead.verdict, closed.verdict) == ("dead", 2, open_verdict.verdict)
    assert state.speeds == {}


def test_of_iterations_before_a_loss_that_are_judged_after_it_the_lost_rank_is_not_accused_again() -> None:
    """A loss is known at once, an iteration is judged when its log is read."""
    detector = Detector()
    committed = list(train(PP4_DP2, slow(3, 2.0, at=10), seed=5, n=60))
    watch(detector, iter(committed[:20]), PP4_DP2)
    known = sight_of(detector.state, detector.options)
    suspect = Suspect(rank=3, how="exit", detail="signal SIGKILL", victims=(0, 1))
    detector.state, _ = lose(detector.state, suspect, 28, detector.options)
    assert watch(detector, iter(committed[20:28]), PP4_DP2) == []
    after = sight_of(detector.state, detector.options)
    assert known.smallest_slowdown is not None
    assert after.smallest_slowdown == pytest.approx(known.smallest_slowdown, rel=0.1)


def test_only_ranks_with_peers_are_compared_from_the_first_iteration_on() -> None:
    """Of a rank three times as slow, alone in its stage, it was said that no rank is slower than the others."""
    for plan, factor, compares in ((PP4_DP2, healthy, True), (PP2, slow(1, 3.0, at=0), False)):
        detector = Detector()
        committed = list(train(plan, factor, seed=6, n=20))
        fitted = fit([chunk for one in committed[:10] for chunk in one.chunks])
        watch(detector, iter(committed[10:]), plan, fitted.model)
        assert sight_of(detector.state, detector.options, alike=True).compares == compares


def test_the_verdict_tells_who_waits_and_the_numbers_that_decided() -> None:
    (verdict,) = run(slow(3, 1.8, at=30), n=40)
    assert isinstance(verdict, Verdict)
    assert {party.rank for party in verdict.victims} == {0, 1, 2, 7}
    assert (
        verdict.sentence
        == f"rank 3 computes at {np.mean(list(verdict.speed.values())):.2f} of its healthy speed since iteration 30"
    )
    ratio = verdict.evidence["time_ratio"]["all"]
    assert {against: pytest.approx(1.8, rel=0.1) for against in ("predicted", "mates")} == ratio
    assert verdict.evidence["cusum"] > verdict.evidence["threshold"]
    assert verdict.config == DetectorOptions().digest != DetectorOptions(slack=0.5).digest


QUIET = list(train(PP4_DP2, healthy, seed=10, n=24))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.integers(0, 7), st.floats(0.05, 1000), min_size=1),
    st.sets(st.integers(8, 15), max_size=3),
    st.permutations(range(64)),
)
def test_no_three_iterations_accuse_however_bad_and_the_order_of_chunks_is_nothing(
    factors: dict[int, float], bad: set[int], order: list[int]
) -> None:
    state = shuffled_state = DetectorState()
    for one in QUIET:
        chunks = tuple(
            msgspec.structs.replace(chunk, us=chunk.us * (factors.get(chunk.rank, 1.0) if one.iteration in bad else 1.0))
            for chunk in one.chunks
        )
        seen = msgspec.structs.replace(one, chunks=chunks)
        shuffled = msgspec.structs.replace(one, chunks=tuple(chunks[i] for i in order))
        state, judgement = step(state, seen, PP4_DP2, COST, DetectorOptions())
        shuffled_state, again = step(shuffled_state, shuffled, PP4_DP2, COST, DetectorOptions())
        assert judgement.verdicts == ()
        assert judgement == again


def test_thresholds_that_let_three_spikes_fire_are_refused() -> None:
    with pytest.raises(ValueError, match="three spikes never fire"):
        DetectorOptions(least_iterations=3)


def test_a_creeping_slowdown_is_named_with_all_that_it_has_crept() -> None:
    """2 parts in 1,000 more per iteration: slower than the habit forgets, up to 1.35 times."""
    creep = lambda now, rank, _: float(np.clip(1 + 0.002 * (now - 40), 1.0, 1.35)) if rank == 6 else 1.0  # noqa: E731
    verdicts = run(creep, seed=11, n=240)
    assert {culprit(v) for v in verdicts} == {6}
    last = verdicts[-1]
    assert isinstance(last, Verdict)
    assert "creep" in {v.evidence["pattern"] for v in verdicts if isinstance(v, Verdict)}
    assert min(last.speed.values()) == pytest.approx(1 / 1.35, abs=0.08)


def test_a_rank_that_is_slow_again_and_again_is_said_to_be() -> None:
    verdicts = run(lambda now, rank, _: 1.5 if rank == 1 and now >= 30 and now // 20 % 2 else 1.0, seed=12, n=120)
    named = [v for v in verdicts if isinstance(v, Verdict)]
    assert [v.evidence["episode"] for v in named] == [1, 2, 3]
    assert named[-1].sentence.endswith("for the 3rd time")


@pytest.mark.slow
def test_its_memory_stays_flat_however_often_a_device_turns_slow_and_heals_and_a_link_as_well() -> None:
    """Ten faults of 20 iterations, then ten more, on devices and links: nothing is kept of those that are over."""
    detector, links = Detector(), [(rank, rank + 1) for rank in (0, 1, 2, 4, 5, 6)]
    held, n_verdicts = [], 0
    random = np.random.default_rng(0)
    for one in train(PP4_DP2, lambda now, rank, _: 1.5 if now % 40 >= 20 and rank == 2 else 1.0, seed=3, n=800, spikes=0.0):
        late = 5.0 if one.iteration % 40 >= 20 else 1.0
        times = (Transfer(a, b, 4e3 * (late if a == 5 else 1.0) * float(np.exp(random.normal(0, 0.05)))) for a, b in links)
        seen = msgspec.structs.replace(one, transfers=tuple(times))
        n_verdicts += len(detector.observe(seen, PP4_DP2, COST).verdicts)
        if one.iteration % 40 == 15:
            held.append(held_bytes(detector.state))
    assert n_verdicts > 60
    assert held[-1] > 10_000
    # Two equal numbers may or may not be one object, of 28 bytes; a record per fault would be ten times that and more.
    assert max(held[10:]) <= max(held[2:10]) + 56


@pytest.mark.slow
def test_the_smallest_slowdown_that_is_stated_would_have_been_named() -> None:
    plan, past, seeds = uniform_plan(tp=1, pp=2, dp=3, n_layers=8, micro_batches=6), 20, range(20)
    named = 0
    for seed in seeds:
        detector, rank = Detector(), seed % len(plan.ranks)
        watch(detector, train(plan, healthy, seed=seed, n=past), plan)
        stated = sight_of(detector.state, detector.options).smallest_slowdown
        assert stated is not None
        fault = slow(rank, stated, past)
        verdicts = watch(detector, train(plan, fault, seed=seed, n=32, first=past), plan)
        culprits = {culprit(one) for one in verdicts if isinstance(one, Verdict)}
        assert culprits <= {rank}
        named += bool(culprits)
    assert named >= 0.95 * len(seeds)
