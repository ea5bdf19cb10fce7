"""Calm is a claim: a run is called well only where something wrong would have been seen."""

from __future__ import annotations

import pytest

from unskew.analytics.core.outcome import Sight, UnexplainedTime, outcome_of
from unskew.collector.events import Verdict

SEES = Sight(scope="device", smallest_slowdown=1.07)
SEES_LESS = Sight(scope="device", smallest_slowdown=1.4, why="under plan 1 ranks share cores")
BLIND = Sight(scope="device", smallest_slowdown=None, why="3 iterations are too few")
OF_THE_JOB = Sight(scope="job", smallest_slowdown=1.05)
MOSTLY_UNEXPLAINED = UnexplainedTime(of_lost=0.8, of_measured=0.3)


def verdict(sentence: str) -> Verdict:
    return Verdict(
        verdict=1,
        cause="unknown",
        culprits=(),
        since_iteration=3,
        at_iteration=9,
        confidence=1.0,
        sentence=sentence,
        evidence={},
    )


def test_what_was_named_is_wrong_whatever_else_could_not_be_seen() -> None:
    found = outcome_of([verdict("rank 1 is slow."), verdict("rank 2, too")], [BLIND], unexplained=MOSTLY_UNEXPLAINED)
    assert (found.outcome, found.smallest_slowdown) == ("wrong", None)
    assert found.why.startswith("rank 1 is slow; 1 more verdict; no cause explains 80 % of the time lost")
    assert found.sentence.startswith("Rank 1 is slow; ")
    assert outcome_of([], [SEES], failure="the run failed").outcome == "wrong"


@pytest.mark.parametrize(
    ("sights", "smallest", "words"),
    [
        ([SEES], 1.07, "a lasting slowdown of any device by 7 % or more would have been named"),
        ([SEES, SEES_LESS], 1.4, "any device by 40 % or more would have been named; under plan 1 ranks share cores"),
        ([OF_THE_JOB, SEES], 1.07, "any device"),
        ([OF_THE_JOB], 1.05, "a lasting slowdown of the whole job by 5 %"),
    ],
)
def test_well_is_stated_with_what_would_have_been_seen(sights: list[Sight], smallest: float, words: str) -> None:
    found = outcome_of([], sights)
    assert (found.outcome, found.smallest_slowdown) == ("well", smallest)
    assert words in found.sentence


@pytest.mark.parametrize(
    ("sights", "gaps", "unexplained", "words"),
    [
        ([], (), None, "nothing in the log can be judged"),
        ([SEES, BLIND], (), None, "3 iterations are too few"),
        ([OF_THE_JOB, BLIND], (), None, "3 iterations are too few"),
        ([Sight(scope="device", smallest_slowdown=3.0)], (), None, "only a lasting slowdown of any device by 200 % or more"),
        ([SEES], ("59 iterations are not in the log",), None, "59 iterations are not in the log"),
        ([SEES], (), MOSTLY_UNEXPLAINED, "no cause explains 80 % of the time lost, 30.0 % of all time"),
    ],
)
def test_what_could_not_be_seen_is_never_calm(
    sights: list[Sight], gaps: tuple[str, ...], unexplained: UnexplainedTime | None, words: str
) -> None:
    found = outcome_of([], sights, gaps=gaps, unexplained=unexplained)
    assert (found.outcome, found.smallest_slowdown) == ("cannot_be_judged", None)
    assert words in found.sentence
    assert found.sentence.startswith("Cannot be judged: ")


def test_a_little_without_a_cause_is_no_reason_to_doubt() -> None:
    assert outcome_of([], [SEES], unexplained=UnexplainedTime(of_lost=1.0, of_measured=0.02)).outcome == "well"
    assert outcome_of([], [SEES], unexplained=UnexplainedTime(of_lost=0.1, of_measured=0.1)).outcome == "well"
