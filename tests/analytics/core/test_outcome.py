"""Calm is a claim: a run is called well only where something wrong would have been seen."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import duckdb
import msgspec
import pytest

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.outcome import Findings, Outcome, Sight, UnexplainedTime, outcome_of, outcome_of_run
from unskew.analytics.core.run_state import RunState, fold
from unskew.collector import events as ev
from unskew.collector.paths import Store
from unskew.collector.read.console import ask, locked
from unskew.collector.read.copy import write_copy
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import hold_controller_lock
from unskew.collector.write.control_stream import ControlStream

SEES = Sight(scope="device", smallest_slowdown=1.07)
SEES_LESS = Sight(scope="device", smallest_slowdown=1.4, why="under plan 1 ranks share cores")
BLIND = Sight(scope="device", smallest_slowdown=None, why="3 iterations are too few")
OF_THE_JOB = Sight(scope="job", smallest_slowdown=1.05)
MOSTLY_UNEXPLAINED = UnexplainedTime(of_lost=0.8, of_measured=0.3)


def verdict(sentence: str, number: int = 1, cause: ev.Cause = "unknown", rank: int | None = None) -> ev.Verdict:
    return ev.Verdict(
        verdict=number,
        cause=cause,
        culprits=() if rank is None else (ev.Party(kind="device", rank=rank),),
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


def test_whether_a_stage_is_dear_is_undecided_until_one_is_named() -> None:
    suspects = Findings(sight=BLIND, suspects=frozenset({2}))
    stage, other = (verdict("", cause=cause) for cause in ("stage_imbalance", "dead"))
    stated = [msgspec.structs.replace(suspects, verdicts=found).undecided for found in ((), (other,), (other, stage))]
    assert stated == [BLIND.why, BLIND.why, ""]
    assert Findings(sight=BLIND).undecided == ""


@pytest.mark.parametrize(("seen", "stated"), [(1.07, 1.07), (2.0, 2.0), (16.986, None)])
def test_who_would_only_have_seen_a_device_at_less_than_half_its_speed_states_nothing_beside_a_verdict(
    seen: float, stated: float | None
) -> None:
    """It stood beside a verdict on a rank at 0.66 of its speed."""
    found = outcome_of([verdict("rank 1 is slow")], [Sight(scope="device", smallest_slowdown=seen)])
    assert (found.outcome, found.smallest_slowdown) == ("wrong", stated)


@pytest.mark.parametrize(
    ("sights", "smallest", "words"),
    [
        ([SEES], 1.07, "a lasting slowdown of any device by 7 % or more would have been named"),
        ([SEES, SEES_LESS], 1.4, "any device by 40 % or more would have been named; under plan 1 ranks share cores"),
        ([OF_THE_JOB, SEES], 1.07, "any device"),
        ([OF_THE_JOB], 1.05, "a lasting slowdown of the whole job by 5 % or more against its first iterations would"),
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
        (
            [Sight(scope="device", smallest_slowdown=1234.5)],
            (),
            None,
            "no lasting slowdown of any device up to ten times would have been named for sure",
        ),
        ([Sight(scope="device", smallest_slowdown=3.0, why="and of a replica")], (), None, "only a lasting slowdown"),
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


def test_that_no_rank_is_slower_is_said_first_where_only_the_whole_job_cannot_be_judged() -> None:
    """Healthy jobs on a restless machine ended as "Cannot be judged", though who was slow would have been named."""
    beside, noisy = msgspec.structs.replace(SEES, compares=True), msgspec.structs.replace(OF_THE_JOB, smallest_slowdown=3.09)
    found = outcome_of([], [beside, noisy])
    assert (found.outcome, found.smallest_slowdown) == ("cannot_be_judged", 1.07)
    words = "No rank is slower than the others by 7 % or more; the whole job cannot be judged: only a lasting slowdown of the"
    assert found.sentence.startswith(words)
    hidden = [
        outcome_of([], [SEES, noisy]),
        outcome_of([], [beside, BLIND, noisy]),
        outcome_of([], [beside, noisy], gaps=["59 iterations are not in the log"]),
        outcome_of([], [beside, noisy], lacks=["9 events could not be written"]),
        outcome_of([], [beside, noisy], unexplained=MOSTLY_UNEXPLAINED),
        outcome_of([], [noisy]),
    ]
    assert not [one for one in hidden if "slower" in one.sentence or one.smallest_slowdown is not None]
    assert all(one.sentence.startswith("Cannot be judged: ") for one in hidden)


def test_a_little_without_a_cause_is_no_reason_to_doubt() -> None:
    assert outcome_of([], [SEES], unexplained=UnexplainedTime(of_lost=1.0, of_measured=0.02)).outcome == "well"
    found = outcome_of([], [SEES], unexplained=UnexplainedTime(of_lost=0.1, of_measured=0.1))
    assert found.outcome == "well"
    assert found.why.endswith("; no cause explains 10 % of the time lost, 10.0 % of all time"), "and yet it is stated"


def test_of_the_time_lost_nothing_is_said_where_nobody_added_it_up() -> None:
    """Beside a rank at half its speed, which explains most of it, "100 % of the time lost" was said to have no cause."""
    unnamed = UnexplainedTime(of_measured=0.053, where="; 1 of 10 iterations takes longer than noise explains")
    assert outcome_of([], [SEES], unexplained=unnamed).outcome == "cannot_be_judged"
    why = outcome_of([verdict("rank 1 is slow")], [SEES], unexplained=unnamed).why
    assert why == "rank 1 is slow; no cause explains 5.3 % of all time; 1 of 10 iterations takes longer than noise explains"


STARTED = ev.RunStarted(run="r", device="sleep", clock="monotonic", mode="auto", ranks=4, options={}, code="", version="")
SEEN = ev.DetectionLimit(at_iteration=9, smallest_slowdown=1.15)
HARDLY = ev.DetectionLimit(at_iteration=9, smallest_slowdown=3.0)
NEVER = ev.DetectionLimit(at_iteration=9, smallest_slowdown=1234.5)
BLINDED = ev.DetectionLimit(at_iteration=20, smallest_slowdown=None, why="the log of the last 5 iterations came too late")
OF_DEVICES = msgspec.structs.replace(BLINDED, why="too noisy", of_devices=1.125)
DONE = ev.RunFinished(status="done", iterations=40)
CLOSED = ev.VerdictClosed(verdict=1, until_iteration=12, at_iteration=14, reason="well again")
DIAGNOSED = ev.Diagnosed(
    observability="chunks",
    verdicts=(),
    time_lost_s={},
    abstained=(),
    outcome="cannot_be_judged",
    why="too noisy",
    status="done",
)
OVER_AGAIN = msgspec.structs.replace(CLOSED, verdict=2)
BLIND_ALONE = msgspec.structs.replace(BLINDED, why="")
JOINED = ev.DeviceJoined(device="d3", rank=3, node="n", pid=1)
LOST = ev.DeviceLost(device="d3", rank=3, how="exit", detail="signal 9", detected_us=1)
CALM = msgspec.structs.replace(DIAGNOSED, outcome="well", smallest_slowdown=1.1, why="any device by 10 %")
BEFORE_THE_END = msgspec.structs.replace(CALM, status="unfinished")
OLD_CALM = msgspec.structs.replace(CALM, status="")
FAILED = ev.RunFinished(status="failed", iterations=3, reason="no plan is left")
BY_ALL = ev.ModeChanged(mode="approve", by="ann")
SLOW, DEAD = verdict("rank 1 is slow", 1, "slow_device", 1), verdict("rank 3 died", 2, "dead", 3)
APPLIED = ev.PlanApplied(plan_version=1, digest="d", proposal="p1", iteration=9, reason="", plan={})
AT_WORK_AGAIN = msgspec.structs.replace(APPLIED, plan=uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4).to_data())
BY_AUTO = ev.CommandRefused(command="approve p2", by="auto", reason="the gain is too small")


def proposed(name: str, number: int | None, *, optional: bool = True) -> ev.PlanProposed:
    return ev.PlanProposed(
        proposal=name, plan_version=1, digest="d", optional=optional, reason="", verdict=number, plan={}, predicted_us=1,
        baseline_us=2, gain_percent=1.0, cost_us=1, payback_iterations=1, at_iteration=9,
    )  # fmt: skip


DIED = [SEEN, SLOW, DEAD, proposed("p1", 2, optional=False), APPLIED]
"""Rank 1 is slow; then rank 3 dies, which plan 1 answers."""
STOPPED_SHORT = ev.RunFinished(status="stopped", iterations=40, committed=60, reason="Ctrl-C or SIGTERM")


def test_what_unequal_data_costs_is_stated_and_is_no_fault() -> None:
    costs = ["micro-batches of unequal work cost 12 % of the time."]
    well = outcome_of([], [SEES], costs=costs)
    assert (well.outcome, well.smallest_slowdown) == ("well", 1.07)
    assert well.why.endswith("would have been named; micro-batches of unequal work cost 12 % of the time")
    assert "cost 12 %" in outcome_of([verdict("rank 1 is slow")], [SEES], costs=costs).why
    blind = outcome_of([], [BLIND], costs=costs)
    assert blind.sentence == "Cannot be judged: 3 iterations are too few; micro-batches of unequal work cost 12 % of the time."


@pytest.mark.parametrize(
    ("events", "controlled", "word", "why"),
    [
        ([], True, "cannot_be_judged", "not started"),
        ([STARTED], True, "cannot_be_judged", "warm-up"),
        ([STARTED, SEEN], True, "well", "any device by 15 %"),
        ([STARTED, SEEN], False, "cannot_be_judged", "has no end, and no controller"),
        ([STARTED, SEEN, BLINDED], True, "cannot_be_judged", "came too late"),
        ([STARTED, SEEN, OF_DEVICES], True, "cannot_be_judged", "no rank is slower than the others by 12.5 % or more"),
        ([STARTED, SEEN, verdict("rank 1 is slow")], True, "wrong", "rank 1 is slow"),
        ([STARTED, SEEN, verdict("rank 1 is slow"), CLOSED], True, "well", "; 1 verdict before, no longer open"),
        ([STARTED, SEEN, verdict("rank 1 is slow."), CLOSED, DONE], False, "wrong", "rank 1 is slow, until iteration 12"),
        ([STARTED, DONE], False, "cannot_be_judged", "over before"),
        ([STARTED, SEEN, DONE], False, "well", "15 %"),
        ([STARTED, SEEN, FAILED], False, "wrong", "no plan"),
        ([STARTED, SEEN, verdict("rank 1 is slow"), FAILED], False, "wrong", "rank 1 is slow; the run failed: no plan is left"),
        ([STARTED, SEEN, DONE, DIAGNOSED], False, "cannot_be_judged", "too noisy"),
        ([STARTED, DONE, CALM], False, "well", "10 %"),
        ([STARTED, SEEN, BEFORE_THE_END, FAILED], False, "wrong", "no plan"),
        ([STARTED, SEEN, BEFORE_THE_END, verdict("rank 1 is slow"), DONE], False, "wrong", "rank 1 is slow"),
        ([STARTED, BEFORE_THE_END, STOPPED_SHORT], False, "cannot_be_judged", "40 of the 60"),
        ([STARTED, OLD_CALM, DONE], False, "cannot_be_judged", "over before"),
        ([msgspec.structs.replace(STARTED, device="simulated"), DONE], False, "cannot_be_judged", "simulated"),
        ([msgspec.structs.replace(STARTED, clock="imported"), DONE], False, "cannot_be_judged", "nobody has judged"),
    ],
)
def test_the_log_of_a_run_tells_how_it_goes(events: list[ev.Control], controlled: bool, word: str, why: str) -> None:
    found = outcome_of_run(reduce(fold, events, RunState()), controlled=controlled)
    assert found.outcome == word
    assert why in found.why


@pytest.mark.parametrize(
    ("events", "first"),
    [
        (DIED, "Rank 1 is slow; 1 more verdict."),
        ([BY_ALL, *DIED, proposed("p2", 2), verdict("the job is slow", 3)], "Rank 1 is slow; 2 more verdicts."),
        ([*DIED, proposed("p2", 2), verdict("the job is slow", 3)], "The job is slow; 2 more verdicts."),
    ],
)
def test_what_waits_for_a_person_is_said_before_what_is_answered(events: list[ev.Control], first: str) -> None:
    """A death that its recovery had answered stood before the slow rank for which a proposal waited, as it was newer."""
    assert outcome_of_run(reduce(fold, [STARTED, *events], RunState()), controlled=True).sentence == first


def test_sql_gives_the_same_outcome_as_the_page(tmp_path: Path) -> None:
    """Also of a run whose controller was killed a moment ago: what it wrote last says nothing of now."""
    store = Store(tmp_path)
    stories: dict[str, list[ev.Control]] = {
        "warm-up": [], "seen": [SEEN], "blinded": [SEEN, BLINDED], "slow": [SEEN, verdict("rank 1 is slow")],
        "well-again": [SEEN, verdict("rank 1 is slow"), CLOSED, DONE], "short": [DONE], "diagnosed": [SEEN, DONE, DIAGNOSED],
        "slow-failed": [SEEN, verdict("rank 1 is slow"), FAILED],
        "failed": [SEEN, FAILED], "calm": [DONE, CALM], "old-calm": [DONE, OLD_CALM], "killed": [SEEN],
        "slow-later": [SEEN, BEFORE_THE_END, verdict("rank 1 is slow"), DONE], "failed-later": [BEFORE_THE_END, FAILED],
        "stopped-short": [SEEN, BEFORE_THE_END, STOPPED_SHORT],
        "unwritten": [SEEN, msgspec.structs.replace(DONE, unwritten=1234)],
        "two-open": [SEEN, verdict("rank 1 is slow."), verdict("rank 2 is slow.", 2)],
        "three-open": [SEEN, *(verdict(f"rank {n} is slow", n) for n in (1, 2, 3)), verdict("rank 1 is slower", 1)],
        "two-over": [SEEN, verdict("rank 1 is slow"), CLOSED, verdict("rank 2", 2), OVER_AGAIN],
        "factor": [msgspec.structs.replace(SEEN, smallest_slowdown=12.4)],
        "endless": [msgspec.structs.replace(SEEN, smallest_slowdown=1e9)],
        "bounded": [msgspec.structs.replace(SEEN, smallest_slowdown=1.155, why="and of links by 20 %")],
        "never": [NEVER, DONE],
        "hardly": [HARDLY, DONE], "hardly-slow": [HARDLY, verdict("rank 1 is slow"), DONE], "no-reason": [BLIND_ALONE, DONE],
        "failed-unwritten": [SEEN, msgspec.structs.replace(FAILED, unwritten=3)],
        "slow-unwritten": [SEEN, verdict("rank 1 is slow"), msgspec.structs.replace(DONE, unwritten=3)],
        "slow-killed": [SEEN, verdict("rank 1 is slow")],
        "failed-without-a-word": [SEEN, msgspec.structs.replace(FAILED, reason="")],
        "incomplete": [SEEN, ev.RunFinished(status="incomplete", iterations=40, committed=40, reason="its end is missing.")],
        "dead": [SEEN, JOINED, LOST, verdict("rank 3 died", 1, "dead", 3)],
        "back": [SEEN, JOINED, LOST, verdict("rank 3 died", 1, "dead", 3), JOINED, DONE],
        "given-a-role": [SEEN, JOINED, LOST, verdict("rank 3 died", 1, "dead", 3), AT_WORK_AGAIN, DONE],
        "lost-again": [JOINED, LOST, verdict("rank 3 died", 1, "dead", 3), AT_WORK_AGAIN, LOST, verdict("3", 2, "dead", 3)],
        "answered": DIED,
        "asked": [BY_ALL, *DIED, proposed("p2", 2), verdict("the job is slow", 3)],
        "asked-of-nobody": [*DIED, proposed("p2", 2), verdict("the job is slow", 3)],
        "refused-by-auto": [*DIED, proposed("p2", 2), verdict("the job is slow", 3), BY_AUTO],
        "asked-before-its-end": [BY_ALL, *DIED, proposed("p2", 2), verdict("the job is slow", 3), DONE],
        "all-answered": [SEEN, SLOW, proposed("p1", 1), verdict("rank 2 is slow", 2, "slow_device", 2), APPLIED],
        "again-after-its-end": [SLOW, CLOSED, proposed("p1", 2), verdict("rank 1 is slow again", 4, "slow_device", 1), APPLIED],
        "two-over-at-its-end": [SEEN, SLOW, CLOSED, verdict("rank 2", 2, "slow_device", 2), OVER_AGAIN, DONE],
        "one-over-at-its-end": [*DIED, verdict("rank 2", 4, "slow_device", 2), CLOSED, DONE],
        "over-and-answered": [SLOW, proposed("p1", 1), verdict("2", 2, "slow_device", 2), APPLIED, CLOSED, OVER_AGAIN, DONE],
        "old-wrong": [DONE, msgspec.structs.replace(DIAGNOSED, outcome="", why="", verdicts=({"sentence": "rank 4"},))],
        "of-devices": [SEEN, OF_DEVICES], "of-devices-over": [OF_DEVICES, DONE], "of-devices-killed": [OF_DEVICES],
        "of-devices-unwritten": [OF_DEVICES, msgspec.structs.replace(DONE, unwritten=3)], "of-devices-slow": [OF_DEVICES, SLOW],
        "of-devices-before": [OF_DEVICES, BLINDED, DONE],
        "of-devices-diagnosed": [DONE, msgspec.structs.replace(DIAGNOSED, smallest_slowdown=1.2)],
        "old-blind": [DONE, msgspec.structs.replace(DIAGNOSED, outcome="", why="")],
    }  # fmt: skip
    killed = {"killed", "slow-killed", "of-devices-killed"}
    kinds = {"imported": {"clock": "imported"}, "simulated": {"device": "simulated"}}
    stories |= {f"{kind}-{over}": [DONE] * (over == "over") for kind in kinds for over in ("now", "over")}

    def started(run: str) -> ev.RunStarted:
        return msgspec.structs.replace(STARTED, run=run, **kinds.get(run.partition("-")[0], {}))

    held = [hold_controller_lock(store, run) for run in stories if run not in killed]
    for run, events in stories.items():
        stream = ControlStream(store, run, f"run/{run}", "controller")
        stream.append(stream.version, [started(run), *events], actor="controller")
        stream.close()
    with open_store(store) as reader:
        rows = {row["run"]: row for row in reader.sql("select * from outcomes").to_dicts()}
        of_console = ask(locked(str(tmp_path)), "select * from outcomes", lambda batches: batches.read_all())
        assert {row["run"]: row for row in of_console.to_pylist()} == rows
        for one in held:
            one.release()
        reader.refresh()
        assert reader.sql("select * from outcomes where outcome = 'well' and run in ('seen', 'bounded')").height == 0
        write_copy(reader, tmp_path / "copy.duckdb")
    with duckdb.connect(str(tmp_path / "copy.duckdb")) as copy:
        assert copy.sql("select why from outcomes where run = 'killed'").fetchall() == [(rows["killed"]["why"],)]
    for run, events in stories.items():
        state = RunState()
        for at_us, event in enumerate([started(run), *events]):
            state = fold(state, event, at_us)
        expected = outcome_of_run(state, controlled=run not in killed)
        assert rows[run]["n_open"] == len(state.open_verdicts), run
        assert Outcome(**{name: rows[run][name] for name in ("outcome", "smallest_slowdown", "why")}) == expected, run
