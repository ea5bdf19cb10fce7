"""Step times of ranks, made up: what is stated is found, an episode is one verdict, and noise accuses nobody."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from unskew.analytics.core.outcome import Findings
from unskew.analytics.detector.options import SHARED_MACHINE, DetectorOptions
from unskew.analytics.detector.residuals import Flags, Floats
from unskew.analytics.detector.workers import RankTimes, judge_workers

RHO = 0.6


def noisy(random: np.random.Generator, steps: int, ranks: int, sigma: float, rho: float = 0.0) -> Floats:
    """Step times whose logs vary by sigma, neighbours alike by rho."""
    fresh = random.normal(0, 1, (steps, ranks))
    logs = fresh.copy()
    for step in range(1, steps):
        logs[step] = rho * logs[step - 1] + np.sqrt(1 - rho**2) * fresh[step]
    return np.asarray(1e5 * np.exp(sigma * logs))


def judged(us: Floats, *, equal_work: bool, options: DetectorOptions | None = None) -> Findings:
    steps, ranks = us.shape
    times = RankTimes(("step",), tuple(range(steps)), dict.fromkeys(range(ranks), 0), us[None])
    return judge_workers(times, options or DetectorOptions(), equal_work=equal_work)


def named(found: Findings) -> list[int | None]:
    return [party.rank for verdict in found.verdicts for party in verdict.culprits]


@pytest.mark.slow
@pytest.mark.parametrize("equal_work", [True, False])
@pytest.mark.parametrize(("ranks", "steps", "sigma"), [(2, 60, 0.05), (3, 14, 0.02), (4, 40, 0.1), (16, 30, 0.03)])
def test_a_slowdown_of_the_size_that_is_stated_is_named(ranks: int, steps: int, sigma: float, equal_work: bool) -> None:
    """Of that size and of three times that, from the middle of the recording on; who is named is named once."""
    tried, found = 0, 0
    for seed in range(5):
        random = np.random.default_rng(1_000 * ranks + seed)
        us = noisy(random, steps, ranks, sigma, RHO * (seed % 2))
        stated = judged(us, equal_work=equal_work).sight.smallest_slowdown
        assert stated is not None
        for more in (1.0, 3.0):
            slowed, who = us.copy(), int(random.integers(ranks))
            slowed[steps // 2 :, who] *= 1 + more * (stated - 1)
            tried, found = tried + 1, found + (named(judged(slowed, equal_work=equal_work)) == [who])
    assert found >= 0.95 * tried


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_two_slow_of_four_do_not_share_their_slowness(spread: float) -> None:
    """One of the three others is slow, so that the longer of the two healthy ones was the measure: 0.674 and 0.702."""
    speeds = []
    for seed in range(20):
        us = noisy(np.random.default_rng(seed), 60, 4, spread)
        us[15:, [1, 3]] *= 1.5
        found = judged(us, equal_work=True)
        assert sorted(rank for rank in named(found) if rank is not None) == [1, 3]
        speeds += [verdict.speed["step"] for verdict in found.verdicts]
    assert np.mean(speeds) == pytest.approx(1 / 1.5, rel=0.01)
    assert np.std(speeds) < 0.03


def test_one_who_is_named_does_not_make_others_pass() -> None:
    """Ranks differ by 4 % for good. When those in no episode were the measure, one that was found made others of all that are
    left pass: 26 were named that take less than 7 % longer."""
    named_so, ranks = 0, 8
    for seed in range(40):
        random = np.random.default_rng([seed, ranks])
        lasting = random.normal(0, 0.04, ranks)
        found = judged(noisy(random, 60, ranks, 0.02) * np.exp(lasting), equal_work=True)
        over = [lasting[rank] - np.median(np.delete(lasting, rank)) for rank in named(found) if rank is not None]
        named_so += sum(one < np.log(1.07) for one in over)
    assert named_so <= 4


@pytest.mark.parametrize("equal_work", [True, False])
@pytest.mark.parametrize(("ranks", "slow"), [(3, [1, 2]), (5, [1, 2, 3])])
def test_most_ranks_slow_for_a_while_are_each_named(ranks: int, slow: list[int], equal_work: bool) -> None:
    """The median over the others moves with those that are slow: all passed, and a slowdown of 7.9 % was said to show."""
    us = noisy(np.random.default_rng(ranks), 60, ranks, 0.005)
    us[25:35, slow] *= 1.12
    found = judged(us, equal_work=equal_work)
    assert sorted(rank for rank in named(found) if rank is not None) == slow
    assert [verdict.speed["step"] for verdict in found.verdicts] == pytest.approx([1 / 1.12] * len(slow), rel=0.01)


def test_who_is_slower_than_few_of_the_others_from_the_first_iteration_on_lets_nobody_be_well() -> None:
    """Two of three slow by 12 %, or one fast: no time of theirs shows which. A slowdown of 7.4 % was said to show."""
    us = noisy(np.random.default_rng(3), 60, 3, 0.005)
    us[:, 1:] *= 1.12
    found = judged(us, equal_work=True)
    assert (found.verdicts, found.sight.smallest_slowdown) == ((), None)
    assert found.sight.why == (
        "ranks 1, 2 take up to 1.12 times as long as the calmest ranks with the same layers, but no longer than most of them: "
        "they are slow, or these are fast"
    )


def test_a_rank_a_million_times_slower_has_a_speed_and_a_sentence() -> None:
    """It was 0.0, whose logarithm what scores the verdict later needs, and "0.00 of its healthy speed"."""
    us = noisy(np.random.default_rng(1), 40, 4, 0.02)
    us[20:, 1] *= 1e6
    (verdict,) = judged(us, equal_work=True).verdicts
    assert verdict.speed == {"step": 1e-4}
    assert "at 1/10,000 of its healthy speed" in verdict.sentence


@pytest.mark.slow
@pytest.mark.parametrize("equal_work", [True, False])
def test_noise_of_which_neighbours_are_alike_accuses_nobody(equal_work: bool) -> None:
    """At what was once accused in 18 of 60 tables of equal work."""
    for seed in range(12):
        random = np.random.default_rng(seed)
        us = noisy(random, int(random.integers(14, 120)), int(random.choice([2, 4, 8])), 0.05, (0.3, 0.6, 0.8)[seed % 3])
        assert named(judged(us, equal_work=equal_work)) == []


@pytest.mark.slow
@pytest.mark.parametrize("equal_work", [True, False])
def test_ranks_that_take_a_tenth_longer_now_and_then_accuse_nobody(equal_work: bool) -> None:
    """One iteration in five, of which a spread from median distances sees nothing: six in a row come by chance."""
    for seed in (0, 1, 2):
        random = np.random.default_rng(seed)
        us = noisy(random, 200, 8, 0.015) * np.where(random.random((200, 8)) < 0.22, 1.1, 1.0)
        assert named(judged(us, equal_work=equal_work)) == []
        us[120:, 3] *= 1.15
        assert named(judged(us, equal_work=equal_work)) == [3]


def test_a_stage_whose_ranks_all_turn_slow_is_named_as_a_stage() -> None:
    us = noisy(np.random.default_rng(0), 80, 8, 0.02)
    us[40:, :4] *= 2
    times = RankTimes(("step",), tuple(range(80)), {rank: rank // 4 for rank in range(8)}, us[None])
    (verdict,) = judge_workers(times, DetectorOptions(), equal_work=True).verdicts
    assert (verdict.cause, verdict.culprits[0].stage) == ("stage_imbalance", 0)


@pytest.mark.slow
def test_where_single_iterations_are_often_long_nobody_is_accused() -> None:
    """One in five takes nearly twice as long, as on shared cores, and some come in a row: in 9 of these 20 healthy tables a
    rank was accused, and beside one that really is slow in as many."""
    accused, right = 0, 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        us = noisy(random, 60, 4, 0.02) * np.where(random.random((60, 4)) < 0.2, 1.85, 1.0)
        accused += bool(judged(us, equal_work=True).verdicts)
        us[30:, 2] *= 3
        right += named(judged(us, equal_work=True)) == [2]
    assert accused == 0
    assert right >= 18


@pytest.mark.slow
@pytest.mark.parametrize("equal_work", [True, False])
def test_however_often_iterations_are_long_hardly_anybody_is_accused(equal_work: bool) -> None:
    """One to three in five, by lot or in rows, of one length or of any: in 21 of these 108 healthy
    tables a rank was accused, and in 17 another than the one that is three times as slow from half on."""
    accused, right, wrong = 0, 0, 0
    for ranks, seed in itertools.product((2, 4, 8), range(18)):
        random = np.random.default_rng([seed, ranks])
        steps, share = (30, 60, 150)[seed % 3], (0.2, 0.4, 0.6)[seed // 3 % 3]
        long = in_rows(random, (steps, ranks), share, goes_on=0.6 if seed >= 9 else share)
        more = np.exp(np.abs(random.normal(0.6, 0.4, long.shape))) if seed % 2 else np.full(long.shape, 1.85)
        us = noisy(random, steps, ranks, 0.02) * np.where(long, more, 1.0)
        accused += bool(judged(us, equal_work=equal_work).verdicts)
        us[steps // 2 :, 1] *= 3
        found = set(named(judged(us, equal_work=equal_work)))
        right, wrong = right + (found == {1}), wrong + bool(found - {1})
    assert wrong == 0
    assert accused <= 3
    assert right >= 48


def in_rows(random: np.random.Generator, shape: tuple[int, int], share: float, goes_on: float) -> Flags:
    """[iteration, rank]: which are long; that a long one is followed by another has a chance of its own."""
    long = random.random(shape) < share
    for step in range(1, len(long)):
        begins = share * (1 - goes_on) / (1 - share)
        long[step] = random.random(shape[1]) < np.where(long[step - 1], goes_on, begins)
    return long


@pytest.mark.parametrize("equal_work", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_of_two_ranks_one_that_is_slow_twice_is_named(seed: int, equal_work: bool) -> None:
    """For a quarter of the time each. Of the other's readings half are lower, so each change of level passed for noise of
    both: nobody was named in 25 of 30 such tables, and 5 times as slow was what would have been."""
    us = noisy(np.random.default_rng(seed), 120, 2, 0.03)
    us[15:45, 1] *= 1.5
    us[75:105, 1] *= 1.5
    found = judged(us, equal_work=equal_work)
    assert named(found) == [1, 1]
    assert found.sight.smallest_slowdown is not None
    assert found.sight.smallest_slowdown < 1.15


@pytest.mark.parametrize("equal_work", [True, False])
@pytest.mark.parametrize("episodes", [[(40, 70)], [(20, 50), (80, 110)], [(60, 120)]])
def test_an_episode_is_one_verdict(episodes: list[tuple[int, int]], equal_work: bool) -> None:
    us = noisy(np.random.default_rng(8), 120, 4, 0.03, 0.3)
    for begin, end in episodes:
        us[begin:end, 2] *= 1.5
    found = judged(us, equal_work=equal_work).verdicts
    assert [verdict.culprits[0].rank for verdict in found] == [2] * len(episodes)
    for verdict, (begin, end) in zip(found, episodes, strict=True):
        assert abs(verdict.since_iteration - begin) <= 2
        assert abs((verdict.until_iteration or 120) - end) <= 2
        assert verdict.speed["step"] == pytest.approx(1 / 1.5, rel=0.05)


@pytest.mark.parametrize("equal_work", [True, False])
@pytest.mark.parametrize(("begin", "end"), [(25, 35), (20, 50), (0, 60)])
@pytest.mark.parametrize(("ranks", "slow"), [(4, 3), (8, 7)])
def test_where_most_ranks_are_slow_together_nobody_is_well(
    ranks: int, slow: int, begin: int, end: int, equal_work: bool
) -> None:
    """Their median is slow, so nobody was longer, and a slowdown by less than theirs was stated to show."""
    us = noisy(np.random.default_rng(ranks), 60, ranks, 0.02)
    us[begin:end, :slow] *= 1.25
    found = judged(us, equal_work=equal_work)
    named = {party.rank for one in found.verdicts for party in one.culprits}
    assert named == set(range(slow)) or (not named and not found.sight.sees)


@pytest.mark.parametrize("until", [30, 60])
def test_a_rank_slow_from_the_first_recorded_step_on_is_dated_to_it(until: int) -> None:
    """Where the work is equal: else nobody can know. Not to the step after it, whose number is five higher here. What ends is
    not "always heavier"."""
    us = noisy(np.random.default_rng(8), 60, 4, 0.03)
    us[:until, 2] *= 1.5
    times = RankTimes(("step",), tuple(range(100, 400, 5)), dict.fromkeys(range(4), 0), us[None])
    (verdict,) = judge_workers(times, DetectorOptions(), equal_work=True).verdicts
    assert (verdict.culprits[0].rank, verdict.since_iteration) == (2, 100)
    assert ("always heavier" in verdict.sentence) == (until == 60)


@pytest.mark.parametrize(("sigma", "stated"), [(0.02, True), (0.5, False)])
def test_of_a_rank_that_has_nobody_beside_it_no_change_is_stated_that_takes_a_factor_of_two(sigma: float, stated: bool) -> None:
    times = RankTimes(("step",), tuple(range(40)), {0: 0, 1: 0, 2: 1}, noisy(np.random.default_rng(0), 40, 3, sigma)[None])
    sight = judge_workers(times, DetectorOptions(), equal_work=True).sight
    assert not sight.sees
    assert ("turned slow later by" in sight.why) == stated


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("options", [DetectorOptions(), SHARED_MACHINE])
def test_whatever_the_noise_there_is_an_answer(seed: int, options: DetectorOptions) -> None:
    """Heavy noise, holes, one rank or few iterations: a rank that has nobody beside it ended in an error."""
    random = np.random.default_rng(seed)
    us = noisy(random, int(random.integers(1, 50)), 1 + seed % 4, float(random.uniform(0.3, 2.0)))
    us[random.random(us.shape) < 0.1 * (seed % 3)] = np.nan
    for equal_work in (True, False):
        found = judged(us, equal_work=equal_work, options=options)
        assert found.sight.smallest_slowdown is None or found.sight.smallest_slowdown > 1
