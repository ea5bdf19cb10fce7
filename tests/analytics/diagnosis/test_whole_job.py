"""Every rank is slower alike, bit by bit or now and then: no device differs from the others, and the job is not well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from support.dashboard.runs import healthy
from support.dashboard.store import RunWriter
from support.traces.noisy_series import Floats, megatron, mlperf

from unskew.analytics.diagnosis.diagnose import Diagnosis, diagnose
from unskew.analytics.diagnosis.whole_job import common_pace, judge_job
from unskew.collector.events import Party, RunFinished, Verdict
from unskew.collector.formats.registry import bring_in
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run

STEPS = 90


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def of_run(store: Store, run: str) -> Diagnosis:
    with open_store(store) as reader:
        return diagnose(load_run(reader, run))


def noise(n: int, sd: float = 0.006) -> Floats:
    return np.asarray(np.exp(np.random.default_rng(n).normal(0, sd, n)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "word", "words"),
    [
        (np.ones(300), "well", "of the whole job by"),
        (np.linspace(1, 0.7, 300), "well", "of the whole job by"),
        (np.linspace(1, 1.4, 700), "wrong", "slower bit by bit"),
        (np.linspace(1, 1.9, 250), "wrong", "slower bit by bit"),
        (np.where(np.arange(240) % 5 == 2, 1.9, 1.0), "cannot_be_judged", "longer than noise explains"),
        (np.where(np.arange(240) % 12 == 7, 8.0, 1.0), "cannot_be_judged", "longer than noise explains"),
        (np.where(np.arange(240) % 60 == 7, 1.9, 1.0), "well", "4 of 235 iterations take longer than noise explains"),
        (np.where(np.arange(200) < 30, 1.5, 1.0), "cannot_be_judged", "until iteration 30 they take 1.50 times as long as"),
        (np.where(np.arange(400) < 20, 1.3, 1.0), "well", "1.5 % of all time; until iteration 20"),
        (
            np.where(np.isin(np.arange(14), range(2, 7)), 3.0, 1.0),
            "cannot_be_judged",
            "5 of the first 14 iterations take longer",
        ),
        (np.where(np.arange(30) < 2, 9.0, 1.0), "well", "against its first iterations"),
    ],
    ids=[
        "steady",
        "faster",
        "slow drift",
        "fast drift",
        "every fifth",
        "every twelfth",
        "a few",
        "slow first",
        "a little slow",
        "slow among the first five",
        "start-up",
    ],
)
def test_iteration_times_alone(store: Store, tmp_path: Path, pace: Floats, word: str, words: str) -> None:
    times = noise(len(pace)) * pace
    (tmp_path / "t.csv").write_text("step,seconds\n" + "\n".join(f"{i},{one}" for i, one in enumerate(times)))
    (brought,) = bring_in(store, "iteration-times", tmp_path / "t.csv")
    found = of_run(store, brought.run)
    assert (found.outcome, words in found.why) == (word, True), found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_that_become_slow_together(store: Store, tmp_path: Path, ranks: int, factor: float) -> None:
    """Parts of steps, which pass for chunks; all ranks meet in the all-reduce."""
    random, rows = np.random.default_rng(ranks), ["step,rank,seconds,forward,backward,all_reduce"]
    for step in range(STEPS):
        slower = factor if 50 <= step < (75 if factor == 2 else STEPS) else 1.0
        forward, backward = (slower * us * np.exp(random.normal(0, 0.01, ranks)) for us in (0.02, 0.04))
        ready = forward + backward
        reduced = ready.max() + 0.005 - ready
        rows += [
            f"{step},{rank},{ready.max() + 0.006},{forward[rank]},{backward[rank]},{reduced[rank]}" for rank in range(ranks)
        ]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    (brought,) = bring_in(store, "iteration-times", tmp_path / "t.csv")
    found = of_run(store, brought.run)
    if factor == 1 and ranks == 1:  # from the first step on slow or with more to do: there is nobody to compare with
        assert found.outcome == "cannot_be_judged", found.sentence
        return
    if factor == 1:
        assert found.outcome == "well", found.sentence
        assert "of any device by" in found.why
        assert "of the whole job by" in found.why
        return
    assert found.outcome != "well"
    assert not any(party.rank is not None for one in found.verdicts for party in one.culprits)
    (stated,) = [one for one in found.abstained if one.startswith("unknown: ")]
    until = ", until iteration 75" if factor == 2 else ""
    assert f"times as long since iteration 50{until}: all ranks are slower alike or their data is longer" in stated
    assert found.verdicts or stated.removeprefix("unknown: ") in found.why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "named"),
    [
        ((), []),
        ((2,), [("slow_device", [2])]),
        ((2, 4), [("slow_device", [2]), ("slow_device", [4])]),
        (range(6), [("unknown", [])]),
    ],
    ids=["nobody", "one", "two", "all"],
)
def test_of_ranks_that_wait_for_nobody_one_is_not_the_job(
    store: Store, tmp_path: Path, slow: Sequence[int], named: list[tuple[str, list[int]]]
) -> None:
    """The longest step of an iteration is nobody's but its own: what few ranks do is no slowdown of all, what all do is."""
    random, n = np.random.default_rng(11), 240
    us = np.exp(random.normal(0, 0.01, (n, 6))) * (1 + 0.05 * np.arange(6))
    us[90:150, 5] *= 1.065  # too little for a device to be named; the longest step of all takes so much longer
    us[170:, list(slow)] *= 1.4
    rows = [f"{step},{rank},{us[step, rank]}" for step in range(n) for rank in range(6)]
    (tmp_path / "t.csv").write_text("step,rank,seconds\n" + "\n".join(rows))
    (brought,) = bring_in(store, "iteration-times", tmp_path / "t.csv")
    found = of_run(store, brought.run)
    assert [(one.cause, [party.rank for party in one.culprits]) for one in found.verdicts] == named
    assert all(abs(one.since_iteration - 170) <= 3 for one in found.verdicts)


def test_the_pace_of_independent_ranks_is_that_of_most_whom_nobody_is_named_for() -> None:
    rows = [(i, rank, us * (6 if (i, rank) == (3, 2) else 1)) for i in range(8) for rank, us in enumerate((10, 12, 20, 14))]
    steps = pl.DataFrame(rows, schema=["iteration", "rank", "wall_us"], orient="row")
    assert common_pace(steps, []) == [(i, 13.0) for i in range(8)]

    def slow(rank: int, since: int, until: int | None) -> Verdict:
        culprit = (Party(kind="device", rank=rank),)
        return Verdict(
            verdict=1, cause="slow_device", culprits=culprit, since_iteration=since, until_iteration=until, at_iteration=7,
            confidence=1.0, sentence="", evidence={},
        )  # fmt: skip

    both = common_pace(steps, [slow(0, 2, 5), slow(1, 4, None)])
    assert [i for i, _ in both] == [0, 1, 2, 3, 5, 6, 7], "in the fifth half of them are named"


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("slow", [False, True])
def test_an_own_run_is_held_against_what_its_lengths_let_expect(store: Store, slow: bool) -> None:
    writer: RunWriter = healthy(store, iterations=30)
    if slow:
        writer.speeds = {rank: {"F": 0.6, "B": 0.6} for rank in writer.plan.ranks}
    writer.train(25)
    writer.control(RunFinished(status="done", iterations=55))
    writer.close()
    found = of_run(store, "healthy")
    named = [one for one in found.verdicts if one.evidence.get("scope") == "job"]
    assert [one.since_iteration for one in named] == ([30] if slow else [])
    assert not slow or named[0].evidence["time_ratio"] == pytest.approx(1 / 0.6, rel=0.15)
    assert not slow or "all ranks share" in named[0].evidence["next_step"]


@pytest.mark.slow
def test_of_public_series_none_creeps_or_loses_time_that_nobody_explains() -> None:
    series = [one.times for one in [*mlperf(), *megatron()]]
    if not series:
        pytest.skip("data sets mlperf-steptimes and megatron-iteration-times are absent: set UNSKEW_DATASETS")
    for times in series[::5]:
        findings = judge_job([(i, 1e6 * float(s)) for i, s in enumerate(times)], 1, alone=True)
        assert not any("bit by bit" in one.sentence for one in findings.verdicts)
        assert findings.long_ones is not None
        assert not findings.long_ones.too_much


def test_a_job_that_ends_with_long_iterations_has_lost_their_time() -> None:
    """Too few to be an episode, and a third of all time."""
    times = [(i, 1e6 * float(s)) for i, s in enumerate(noise(60))]
    ended = [(i, us * (10 if i >= 57 else 1)) for i, us in times]
    for series, too_much in ((times, False), (ended, True)):
        long_ones = judge_job(series, 1, alone=False).long_ones
        assert long_ones is not None
        assert long_ones.too_much == too_much
