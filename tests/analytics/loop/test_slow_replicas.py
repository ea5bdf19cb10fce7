"""Whose slowness the whole job's is, while it lasts: what is said of replicas is true of the iterations it is said of."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from support.training.adaptation_loop import PLAN, SITE, Loop, events, follow, train

from unskew.analytics.core.cost import Speeds
from unskew.analytics.core.layout import uniform_plan
from unskew.collector.events import Verdict

OF_THREE = uniform_plan(tp=1, pp=4, dp=3, n_layers=16, micro_batches=18)
Paces = list[list[tuple[int, float]]]
"""Per replica: from which iteration on its ranks take how many times as long."""


def pace(changes: list[tuple[int, float]], now: int) -> float:
    return next((times for since, times in reversed(changes) if now >= since), 1.0)


def near(mean: float, since: int, until: int) -> list[tuple[int, float]]:
    return [(now, mean * float(np.exp(np.random.default_rng(now).normal(0, 0.05)))) for now in range(since, until)]


def verdicts_of(paces: Paces, n: int) -> list[Verdict]:
    plan = PLAN if len(paces) == 2 else OF_THREE

    def truth(now: int) -> Speeds:
        times = {rank: pace(paces[rank // 4], now) for rank in plan.ranks}
        return {rank: {"F": 1 / of, "B": 1 / of} for rank, of in times.items() if of != 1}

    return events(follow(Loop(msgspec.structs.replace(SITE, origin=plan)), train(truth, n, plan=plan), plan), Verdict)


@pytest.mark.parametrize(
    ("paces", "named"),
    [
        pytest.param([[(45, 1.2)], [(30, 2.5)]], [[1]], id="the slower stays named"),
        pytest.param([[(45, 1.5)], [(30, 1.5)]], [[1], []], id="both alike"),
        pytest.param([[(30, 1.5), (50, 1.0)], [(30, 1.5)]], [[], [1]], id="one of both heals"),
        pytest.param([[(40, 1.5), (60, 1.0)], [(30, 1.5)]], [[1], [], [1]], id="one joins and heals"),
        pytest.param([near(1.1, 40, 80), [(30, 1.5)]], [[1]], id="one near what is named"),
        pytest.param([near(1.4, 40, 80), [(30, 1.5)]], [[1], []], id="one near the slowest"),
        pytest.param([[(60, 1.2)], [(30, 2.5), (50, 1.2)]], [[1], [1], []], id="it heals in part, and the other joins"),
        pytest.param([[(45, 2.5)], [(30, 1.2)]], [[1], [0]], id="the other is slower, as the job's time shows"),
        pytest.param([[(30, 1.2)], [(30, 2.5)], []], [[1], [1]], id="three of different paces"),
        pytest.param([[(45, 1.5)], [(30, 1.5)], []], [[1], [0, 1]], id="two of three"),
    ],
)
def test_what_is_said_of_replicas_is_true_of_the_iterations_that_it_is_said_of(paces: Paces, named: list[list[int]]) -> None:
    """It was one time for all, in between; stated where some of the iterations were slow; revised again and again near a limit;
    and followed from one that was named only."""
    verdicts = verdicts_of(paces, 80)
    assert [[party.replica for party in one.culprits] for one in verdicts] == named
    for one in verdicts:
        of = sorted(party.replica for party in one.culprits if party.replica is not None)
        assert one.evidence["scope"] == ("replica" if of else "job")
        if not of:
            assert re.fullmatch(r"the whole job takes [\d.]+ times as long since iteration \d+", one.sentence)
            continue
        first, last, took = re.findall(r"in iterations (\d+) to (\d+) (?:its|their) ranks took (.*) as their", one.sentence)[0]
        seen = range(int(first), int(last) + 1)
        true = [float(np.quantile([pace(changes, now) for now in seen], 0.5, method="lower")) for changes in paces]
        stated = [float(times) for times in re.findall(r"([\d.]+) times", took)]
        assert stated == pytest.approx([true[replica] for replica in of], rel=0.03)
        assert max(times for replica, times in enumerate(true) if replica not in of) < min(stated)
        assert one.speed == pytest.approx(dict.fromkeys("FB", 1 / np.mean(stated)), rel=0.03)
