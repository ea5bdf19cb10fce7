"""The terminal view: a fold over log entries, drawn as text."""

from __future__ import annotations

import io
import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.collector import events as ev
from unskew.collector.files.segment import segment_name, telemetry_line
from unskew.collector.files.tail import Entry
from unskew.collector.paths import Store
from unskew.terminal import live
from unskew.terminal.follow import LogFollower
from unskew.terminal.live import Screen
from unskew.terminal.live_state import LiveState, fold
from unskew.terminal.live_view import newest, plain, render, sparkline
from unskew.terminal.sentences import sentence_of

PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
STARTED = ev.RunStarted(
    run="r1", device="sleep", clock="monotonic", mode="approve", ranks=4, options={"iterations": 10}, code="", version="0"
)
APPLIED = ev.PlanApplied(plan_version=0, digest=PLAN.digest, proposal="", iteration=0, reason="", plan=PLAN.to_data())
PROPOSED = ev.PlanProposed(
    proposal="p-1",
    plan_version=1,
    digest="d",
    optional=True,
    reason="rank 1 is slow",
    verdict=1,
    plan={},
    predicted_us=1_000_000,
    baseline_us=1_500_000,
    gain_percent=33.3,
    cost_us=1,
    payback_iterations=1,
    at_iteration=3,
)


def entry(event: ev.Event, at_us: int = 0) -> Entry:
    return Entry(writer="w", segment=1, seq=1, at_us=at_us, stream=None, version=None, actor=None, event=event, raw=b"")


def after(*events: ev.Event) -> LiveState:
    state = LiveState()
    for event in events:
        state = fold(state, entry(event))
    return state


def committed(iteration: int, rank: int, loss: float = 2.0) -> ev.IterationCommitted:
    return ev.IterationCommitted(
        iteration=iteration,
        plan_version=0,
        attempt=0,
        rank=rank,
        loss=loss,
        tokens=1000,
        start_us=0,
        wall_us=500_000,
        log_complete=True,
    )


def judged(iteration: int, *ratios: tuple[int, float]) -> ev.IterationJudged:
    ranks = tuple(ev.RankRatio(rank=rank, measured_us=int(ratio * 1000), healthy_us=1000) for rank, ratio in ratios)
    return ev.IterationJudged(iteration=iteration, plan_version=0, measured_us=1_200_000, predicted_us=1_000_000, ranks=ranks)


def drawn(state: LiveState, width: int = 100, height: int = 60) -> str:
    console = Console(width=width, height=height, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(render(state, [("store", "here")], width, height))
        return console.export_text()


def test_an_iteration_counts_once_though_every_rank_reports_it() -> None:
    state = after(STARTED, *(committed(i, rank, loss=9.0 - i) for i in range(3) for rank in range(4)))
    assert (state.iteration, [one.loss for one in state.past], state.past[-1].tokens_per_s) == (2, [9.0, 8.0, 7.0], 2000.0)


@pytest.mark.parametrize("first", ["committed", "judged"])
def test_figures_of_two_iterations_never_stand_side_by_side(first: str) -> None:
    state = after(STARTED, committed(3, 0, loss=4.25), judged(3))
    later = committed(4, 0, loss=1.5) if first == "committed" else judged(4)
    assert "iteration 3: loss 4.2500  2,000 tokens/s  1.20 s, predicted 1.00 s" in plain(fold(state, entry(later)))
    whole = fold(fold(state, entry(later)), entry(judged(4) if first == "committed" else committed(4, 0, loss=1.5)))
    assert plain(whole).startswith("5 of 10 done  iteration 4: loss 1.5000")
    assert "iteration 4" not in drawn(fold(state, entry(later)))


def test_a_rank_without_a_role_keeps_its_place_and_a_lost_one_gets_no_ratio() -> None:
    other = plan_from_partition(
        plan_version=1, n_layers=4, schedule="1f1b", members=[(0, 1), (2,)], layers=[(3, 1), (4,)], micro_batches=[3, 1]
    )
    lost = ev.DeviceLost(device="d3", rank=3, how="exit", detail="signal 9", detected_us=0)
    applied = ev.PlanApplied(
        plan_version=1, digest="", proposal="p-1", iteration=2, reason="rank 3 is dead", plan=other.to_data()
    )
    state = after(STARTED, APPLIED, judged(0, (3, 1.0), (1, 1.8)), lost, applied, judged(2, (3, 1.0), (1, 1.7)))
    dead, slow = state.ranks[3], state.ranks[1]
    assert (dead.role.replica, dead.role.stage, dead.holds, dead.ratio, dead.lost) == (1, 1, False, None, "dead")
    assert (slow.ratio, slow.role.first_layer, slow.role.n_layers, slow.micro_batches) == (1.7, 3, 1, 3)
    text = drawn(state)
    assert "3 dead" in text
    assert "plan 1 is in force from iteration 2: rank 3 is dead" in text


def test_the_view_asks_for_a_decision_until_there_is_one() -> None:
    command = "unskew approve p-1 --by NAME --reason TEXT"
    asked = after(STARTED, APPLIED, PROPOSED)
    assert command in drawn(asked)
    assert command not in drawn(fold(asked, entry(ev.PlanRejected(proposal="p-1", by="ann", reason="not now"))))


def test_newer_sentences_displace_older_ones_where_the_terminal_is_low() -> None:
    state = after(STARTED, APPLIED, *(ev.Note(text=f"note {number}", by="ann") for number in range(12)))
    text = drawn(state, width=80, height=24)
    assert "note 11" in text
    assert "note 0" not in text
    assert len(text.splitlines()) <= 24
    assert len(newest(state.lines, columns=1, rows=0)) == 1


def test_a_layout_too_wide_for_a_grid_is_drawn_as_a_strip() -> None:
    plan = uniform_plan(tp=1, pp=16, dp=4, n_layers=16, micro_batches=4)
    applied = ev.PlanApplied(plan_version=0, digest="", proposal="", iteration=0, reason="", plan=plan.to_data())
    text = drawn(after(STARTED, applied, judged(0, (5, 1.0), (40, 1.9))))
    assert "slowest: rank 40, 1.90" in text


def test_without_a_terminal_each_sentence_is_one_plain_line(capsys) -> None:
    with Screen(Console(width=40), [("store", "here")]) as screen:
        screen.feed(entry(STARTED))
        screen.feed(entry(PROPOSED))
        screen.feed(entry(committed(0, 0)))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "store: here"
    assert printed[1] == "run: r1 on 4 ranks, mode approve, device sleep"
    assert printed[2] == "propose: p-1: rank 1 is slow; predicted 1.00 s instead of 1.50 s, 33 % less time"
    assert printed[-1] == "1 of 10 done  iteration 0: loss 2.0000  2,000 tokens/s"


def test_what_to_do_about_a_verdict_stands_below_it(capsys) -> None:
    verdict = ev.Verdict(verdict=1, cause="hung", culprits=(), victims=(), since_iteration=1, at_iteration=1, confidence=1.0,
                         sentence="rank 1 hangs", evidence={"next_step": "read its stack"}, config="")  # fmt: skip
    with Screen(Console(width=40), []) as screen:
        screen.feed(entry(verdict))
    assert capsys.readouterr().out.splitlines()[-2:] == ["verdict: rank 1 hangs", "    next: read its stack"]
    drawn = Console(width=80, record=True, file=io.StringIO())
    drawn.print(render(after(STARTED, verdict), [], 80, 30))
    assert "next: read its stack" in drawn.export_text()


def test_the_view_is_calm_only_where_something_would_have_been_seen() -> None:
    seen = after(STARTED, APPLIED, ev.DetectionLimit(at_iteration=9, smallest_slowdown=1.15))
    alone = ev.DetectionLimit(at_iteration=9, smallest_slowdown=None, why="too noisy", of_devices=1.12)
    words = "No rank is slower than the others by 12 % or more; the whole job cannot be judged: too noisy."
    assert words in " ".join(drawn(after(STARTED, APPLIED, alone)).split())
    assert "Cannot be judged: warm-up" in drawn(after(STARTED, APPLIED))
    assert "Well: a lasting slowdown of any device by 15 % or more would have been named." in drawn(seen)
    assert "Cannot be judged: the run's log has no end, and no controller is known to hold it" in drawn(
        msgspec.structs.replace(seen, controlled=False)
    )


def test_a_loss_that_nobody_read_is_not_shown_like_one_that_diverged() -> None:
    watched = msgspec.structs.replace(STARTED, options={"command": "torchrun train.py"})
    unread, diverged = (after(one, APPLIED, committed(0, 0, loss=math.nan)) for one in (watched, STARTED))
    assert ("nan" in drawn(unread), "nan" in plain(unread)) == (False, False)
    assert ("nan" in drawn(diverged), "loss nan" in plain(diverged)) == (True, True)
    assert "loss 2.0000" in plain(after(watched, APPLIED, committed(0, 0)))


def test_a_sight_that_comes_and_goes_displaces_nothing_else() -> None:
    limits = [ev.DetectionLimit(at_iteration=number, smallest_slowdown=(None, 1.4)[number % 2]) for number in range(20)]
    state = after(STARTED, APPLIED, ev.Note(text="what matters", by="ann"), *limits)
    assert [one.sentence.topic for one in state.lines].count("sight") == 1
    assert "what matters" in drawn(state)


def test_a_run_that_lost_its_controller_is_over() -> None:
    """It was "not fitted yet", and so much time was left."""
    unfitted = msgspec.structs.replace(judged(0), predicted_us=None)
    state = after(STARTED, APPLIED, committed(0, 0), unfitted, PROPOSED)
    assert "p-1 waits for approval" in drawn(state)
    shown = drawn(msgspec.structs.replace(state, controlled=False))
    assert "lost" in shown.splitlines()[1]
    assert "waits for approval" not in shown
    assert "yet" not in shown
    assert "left" not in shown
    assert "the run was over before its iterations could be judged" in " ".join(shown.split())


def test_what_nobody_will_judge_any_more_is_shown_as_it_was_committed() -> None:
    """Of a run that a full disk had killed 53 iterations were done, beside the loss of iteration 0, the only one judged."""
    state = after(STARTED, APPLIED, *(committed(i, 0) for i in range(9)), judged(0))
    assert "iteration 0: loss" in plain(state), "it goes on: no figure of one iteration beside a figure of another"
    lost = plain(msgspec.structs.replace(state, controlled=False))
    assert "9 of" in lost
    assert "iteration 8: loss" in lost


def test_every_control_event_but_the_silent_ones_has_a_sentence() -> None:
    silent = {ev.DeviceJoined, ev.CheckpointSaved, ev.AdaptationStarted, ev.PlanIssued, ev.Diagnosed, ev.AlertDelivered}
    assert {kind for kind in ev.CONTROL if sentence_of.dispatch(kind) is sentence_of.dispatch(object)} == silent


@pytest.mark.parametrize(
    ("effect", "interval", "words"),
    [
        (0.5, (0.4, 0.6), "plan 1 pays: +0.50 s saved an iteration (95 %: +0.40 to +0.60 s, n = 20)"),
        (-0.1, (-0.4, 0.1), "plan 1 makes no certain difference: -0.10 s saved an iteration (95 %: -0.40 to +0.10 s, n = 20)"),
        (-0.5, (-0.6, -0.4), "plan 1 does harm: -0.50 s saved an iteration (95 %: -0.60 to -0.40 s, n = 20)"),
    ],
)
def test_a_score_claims_no_more_than_its_interval(effect: float, interval: tuple[float, float], words: str) -> None:
    scored = ev.PlanScored(
        plan_version=1, proposal="p-1", from_iteration=1, to_iteration=20, n=20, effect_s=effect, interval_s=interval
    )  # fmt: skip
    sentence = sentence_of(scored)
    assert sentence is not None
    assert sentence.text == words


def test_a_diverged_loss_is_shown_and_leaves_a_gap_in_the_curve() -> None:
    assert sparkline((1.0, math.nan, 3.0)) == "▁ █"
    assert sparkline((math.nan,)) == " "
    text = drawn(after(STARTED, committed(0, 0, loss=2.0), committed(1, 0, loss=math.nan), committed(2, 0, loss=math.inf)))
    assert "inf" in text


@pytest.mark.parametrize("broken", ["fold", "plain"])
def test_a_view_that_fails_ends_nothing_and_says_so_once(broken: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no ranks")

    with Screen(Console(width=200), [("store", "here")]) as screen:
        screen.feed(entry(STARTED))
        screen.feed(entry(committed(0, 0)))
        with monkeypatch.context() as bad:
            bad.setattr(live, broken, fail)
            bad.setattr(live, "PLAIN_LINE_S", 0.0)
            for _ in range(3):
                screen.feed(entry(committed(1, 0)))
                screen.tick()
        screen.feed(entry(ev.RunFinished(status="done", iterations=2)))
    assert screen.state.run.finished is not None
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["the live view is incomplete, training is not affected: ZeroDivisionError: no ranks"]


def test_following_loses_nothing_when_a_clock_steps_back_or_a_loss_diverges(tmp_path: Path) -> None:
    store = Store(tmp_path)
    losses = [1.0, math.nan, 2.0, 3.0]
    wall_us = [60_000_000, 90_000_000, 30_000_000, 61_000_000]
    path = store.spool("r") / "rank-0000.1" / segment_name(0)
    path.parent.mkdir(parents=True)
    other = store.spool("r") / "rank-0001.1" / segment_name(0)
    other.parent.mkdir(parents=True)
    other.write_bytes(telemetry_line(0, 75_000_000, ev.Dropped(count=1)))
    seen: list[Entry] = []
    with LogFollower(store, "r") as follow:
        for part in (slice(0, 3), slice(3, 4)):
            with path.open("ab") as file:
                for seq in range(4)[part]:
                    file.write(telemetry_line(seq, wall_us[seq], committed(seq, 0, loss=losses[seq])))
            seen += follow.poll()
        assert follow.poll() == []
    first = [(one.writer, one.seq) for one in seen[:3]]
    assert first == [("rank-0000.1", 0), ("rank-0001.1", 0), ("rank-0000.1", 1)], "by wall clock, each writer in its order"
    assert [one.event.iteration for one in seen if isinstance(one.event, ev.IterationCommitted)] == [0, 1, 2, 3]
    assert math.isnan(seen[2].event.loss)  # type: ignore[union-attr]
