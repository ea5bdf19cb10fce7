"""The benches of the Detector, in small."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from support.dashboard import runs
from support.traces.noisy_series import Floats, Recorded, alibaba

from unskew.benchmarks.detector import episodes, held_out, phases, stated
from unskew.benchmarks.report import bars
from unskew.benchmarks.runs import Bench
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run


@pytest.mark.slow
def test_a_slowdown_of_the_stated_size_is_named_and_none_where_nothing_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    runs.healthy(store, iterations=80).close()
    with open_store(store) as reader:
        log = load_run(reader, "healthy")
    found = stated.injected(log, (44,))
    assert [one.rank for one in found] == [*range(8), None]
    assert all(one.stated is not None and one.named and not one.another for one in found)
    monkeypatch.setattr(stated, "slowed", lambda one, _rank, _factor: one)
    assert not any(one.named for one in stated.injected(log, (44,)))


@pytest.mark.slow
def test_series_that_are_held_out_are_recorded_anew_and_what_is_stated_of_them_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the workers' series, where there are any, a few are asked: what is found in them is not looked at."""
    monkeypatch.setattr(held_out, "alibaba", lambda: islice(alibaba(), 3))
    monkeypatch.setattr(held_out, "REPEATS", 1)
    monkeypatch.setattr(phases, "SURROGATES", 199)
    with bars() as progress:
        found = [*held_out.figures(Bench(progress, Store(tmp_path)), steps=120)]
    assert [one.value is not None for one in found[-3:-1]] == [True, True]
    assert f"{held_out.TIMES_EACH * len(held_out.WORKS)} series, 720 steps" in found[-3].note
    one, other = (held_out.recorded("sorting", 0, 40).times for _ in range(2))
    assert one.tolist() != other.tolist()
    random = np.random.default_rng(3)
    even = [recorded(np.exp(random.normal(0, 0.01, 400)), str(number)) for number in range(2)]
    stated = held_out._stated(even)
    assert (stated.value, stated.note[:6]) == (100.0, "6 of 6")
    even[0].times[200:240] *= 1.5
    false, phases_ = held_out._alarms("made up", even, bar=0)
    assert (false.value, phases_.value) == (0, 1)


def recorded(times: Floats, name: str = "a") -> Recorded:
    return Recorded(name, "work", np.arange(len(times)), times)


def steps(seed: int, *slow: tuple[int, int, float], alike: float = 0.0, n: int = 600) -> Floats:
    """Noise of 2 % in which each keeps `alike` of the one before, and stretches that take so many times as long."""
    random, x = np.random.default_rng(seed), np.zeros(n)
    for i in range(1, n):
        x[i] = alike * x[i - 1] + random.normal(0, 0.02)
    for since, until, factor in slow:
        x[since:until] += np.log(factor)
    return np.asarray(np.exp(x))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_level_that_shifts_is_told_from_noise_from_what_comes_again_and_again_and_from_the_work(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "SURROGATES", 199)

    def why(times: Floats, *stretches: tuple[int, int], twin: Floats | None = None) -> list[str]:
        one = recorded(times)
        twins = [] if twin is None else [recorded(twin, "b")]
        return [phase.why for phase in phases.judged(one, stretches, [one, *twins], seed)]

    burst, shift = (300, 306, 1.3), (100, 200, 1.1)
    assert why(steps(seed, burst, shift), (300, 306), (100, 200)) == ["", ""]
    assert why(steps(seed, shift), (100, 200), twin=steps(seed + 9)) == [""]
    (of_work,) = why(steps(seed, shift), (100, 200), twin=steps(seed + 9, shift))
    assert of_work.startswith("its twin has it too, x1.")
    assert why(steps(seed), (300, 306)) == ["less than 1.05 times a side"]
    restless = steps(seed, *((at, at + 6, 1.3) for at in range(45, 600, 70)))
    assert why(restless, (325, 331)) == ["the noise of the series does that by itself"]
    assert phases.is_slow(np.log(steps(seed, burst)), 300, 306)
    assert not phases.is_slow(np.log(steps(seed)), 300, 306)
    assert not phases.is_slow(np.log(steps(seed, (300, 302, 2.0), (304, 306, 2.0))), 300, 306), "four of six: spikes"
    alike = steps(seed, alike=0.95, n=1_500)
    outs = [phases.excess(np.log(alike), at, at + 15) for at in range(40, 1_440)]
    at = 40 + int(np.argmax(outs))
    assert why(alike, (at, at + 15)) == ["the noise of the series does that by itself"]


def test_a_size_onset_or_end_that_is_not_the_injected_one_misses_its_bar() -> None:
    """A rule that names every episode at once, and states what it is told to."""

    def missed(off: float, since: int, until: int | None) -> list[str]:
        put_in = (episodes.Episode(100, 40, 1.3), episodes.Episode(200, 40, 1.3, ramp=True))

        def rule(_times: Floats) -> list[episodes.Alarm]:
            return [
                episodes.Alarm(e.at + since, e.at, None if until is None else e.until + until, e.factor * off) for e in put_in
            ]

        outings = [episodes.outing(rule, np.ones(300), put_in, quiet) for quiet in (True, False)]
        lines = [one for quiet in (True, False) for one in episodes._stated("a rule", outings, quiet)]
        assert all("1 named episode" in one.note for one in lines), "the ramp has no size of its own"
        return [one.name.split(", ")[0].removeprefix("a rule: stated ") for one in lines if not one.ok]

    assert missed(1.0, 0, 0) == missed(1.019, -3, 3) == []
    assert missed(0.96, 0, 0) == ["size in quiet series"]
    assert missed(1.06, 0, 0) == ["size in quiet series", "size in other series"]
    assert missed(1.0, 4, 0) == ["onset in quiet series", "onset in other series"]
    assert missed(1.0, 0, None) == ["end in quiet series", "end in other series"]
