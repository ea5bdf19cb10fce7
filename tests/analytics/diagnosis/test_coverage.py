"""What nobody recorded is no reason for calm: a missing rank, empty times, time outside what was timed, all but one slow."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest
from support.jobs.ddp_job import Part, RankStep, job, kineto
from support.traces.foreign_traces import log_of, spans_of
from typer.testing import CliRunner

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.diagnosis.coverage import gaps_of
from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.diagnosis.ranks.lockstep import why_in_step
from unskew.cli import app
from unskew.collector.events import Span

RANKS, STEPS = 4, 40
Cell = str | float
Change = Callable[[RankStep, list[Cell]], Sequence[Cell] | None]
"""A recorded row (step, rank, seconds, data_wait, forward, backward, all_reduce) as it is written; None = it is not."""


def outcome(tmp_path: Path, form: str, source: Path) -> tuple[str, str]:
    """Outcome and why, by import and diagnose."""
    store, found = str(tmp_path / "store"), tmp_path / "d.json"
    for arguments in (["import", form, str(source), "--run", "own"], ["diagnose", "own", "--json", str(found)]):
        done = CliRunner().invoke(app, [*arguments, "--store", store])
        assert done.exit_code == 0, done.output
    (run,) = json.loads(found.read_text())["runs"]
    return run["outcome"], run["why"]


def table(path: Path, steps: Sequence[RankStep], change: Change) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "rank", "seconds", "data_wait", "forward", "backward", "all_reduce"])
        for one in steps:
            row = [one.step, one.rank, one.seconds, one.loader, one.forward, one.backward, one.wait]
            if (changed := change(one, row)) is not None:
                rows.writerow(changed)
    return path


def put(row: list[Cell], column: int, value: Cell) -> list[Cell]:
    return [*row[:column], value, *row[column + 1 :]]


def late_outside(one: RankStep, row: list[Cell]) -> list[Cell]:
    """Rank 1 is 2 ms late outside the parts in every step, and the others wait for it."""
    return put(put(row, 2, one.seconds + 0.002), 6, one.wait + (0.0 if one.rank == 1 else 0.002))


def all_but_rank_0(one: RankStep, row: list[Cell]) -> list[Cell]:
    return row if one.rank == 0 or one.step < 20 else put(put(row, 4, 1.4 * one.forward), 5, 1.4 * one.backward)


LACKING: dict[str, tuple[Change, str]] = {
    "a rank left no file": (lambda one, row: None if one.rank == 1 else row, "rank 1 left no record, of 4 ranks"),
    "a rank ends early": (lambda one, row: None if one.rank == 2 and one.step >= 30 else row, "rank 2 has no"),
    "forward of a rank is empty": (lambda one, row: put(row, 4, "") if one.rank == 3 else row, "rank 3 has no forward"),
    "backward is empty now and then": (
        lambda one, row: put(row, 5, "") if one.rank == 1 and one.step % 5 == 0 else row,
        "rank 1 has no backward times in 8 of 40 iterations",
    ),
    "times are zero": (lambda one, row: put(row, 4, 0.0) if one.rank == 1 else row, "100 % of the forward times of rank 1"),
    "iterations are missing": (lambda one, row: None if 10 <= one.step < 20 else row, "10 of 40 iterations are not in"),
    "few iterations": (lambda one, row: row if one.step < 5 else None, "only 5 iterations are recorded"),
    "late outside what is timed": (late_outside, "of the time of rank 1 is outside its recorded passes and waits"),
    "all but one are slow": (all_but_rank_0, "rank 0 takes 0.7"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LACKING)
def test_what_nobody_saw_is_said_and_nobody_is_calm(tmp_path: Path, name: str) -> None:
    change, why = LACKING[name]
    found = outcome(tmp_path, "iteration-times", table(tmp_path / "t.csv", job("nothing", ranks=RANKS, steps=STEPS), change))
    assert found[0] == "cannot_be_judged"
    assert why in found[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_recording_of_a_healthy_job_is_well(tmp_path: Path, seed: int) -> None:
    steps = job("nothing", ranks=RANKS, steps=STEPS, seed=seed)
    assert outcome(tmp_path, "iteration-times", table(tmp_path / "t.csv", steps, lambda _, row: row))[0] == "well"


def test_a_trace_in_which_nothing_takes_time_has_no_part_that_is_outside(tmp_path: Path) -> None:
    """It was "nan %" of the time of rank 1."""
    (folder := tmp_path / "traces").mkdir()
    for rank in range(2):
        events = [
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": 50 * step + at, "dur": 0}
            for step in range(12)
            for name, at in ((f"ProfilerStep#{step}", 0), ("DistributedDataParallel.forward", 100))
        ]
        (folder / f"rank-{rank}.json").write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": events}))
    word, why = outcome(tmp_path, "kineto", folder)
    assert (word, "nan" in why) == ("cannot_be_judged", False), why


def test_the_declared_size_of_the_job_shows_that_a_file_is_missing(tmp_path: Path) -> None:
    folder = kineto(tmp_path / "traces", job("backward", ranks=3))
    (folder / "rank-1.json").unlink()
    judged, why = outcome(tmp_path, "kineto", folder)
    assert (judged, why.split(";")[0]) == ("cannot_be_judged", "rank 1 left no record, of 3 ranks")


def test_one_rank_of_many_is_not_little(tmp_path: Path) -> None:
    """Who is missing may be the slow one, however many are there."""
    steps = [one for one in job("nothing", ranks=16, steps=STEPS) if one.rank != 5]
    found = outcome(tmp_path, "iteration-times", table(tmp_path / "t.csv", steps, lambda _, row: row))
    assert (found[0], "rank 5 left no record, of 16 ranks" in found[1]) == ("cannot_be_judged", True)


INPUT: dict[str, tuple[Part, Change, str, str]] = {
    "as all have": ("nothing", lambda _, row: put(row, 3, 0.0001), "well", "would have been named"),
    "rank 1 is late": ("loader", lambda _, row: row, "wrong", "waiting for input on rank 1 costs"),
    "all wait alike": (
        "nothing", lambda _, row: put(put(row, 2, float(row[2]) + 0.002), 3, 0.0021), "cannot_be_judged",
        "is waiting for input",
    ),
    "three of four have it outside their steps": (
        "nothing", lambda one, row: row if one.rank == 0 else put(row, 3, 0.005), "cannot_be_judged",
        "ranks 1, 2, 3 wait for input outside the timed steps",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUT)
def test_input_that_only_collectives_stand_beside_is_not_left_out_in_silence(tmp_path: Path, name: str) -> None:
    part, change, word, why = INPUT[name]
    steps = job(part, ranks=RANKS, steps=STEPS, late_s=0.002)
    source = table(tmp_path / "t.csv", steps, lambda one, row: put(put(list(change(one, row) or ()), 4, ""), 5, ""))
    found = outcome(tmp_path, "iteration-times", source)
    assert (found[0], why in found[1]) == (word, True), found[1]
    (run,) = json.loads((tmp_path / "d.json").read_text())["runs"]
    causes = [(one["cause"], [party["rank"] for party in one["culprits"]]) for one in run["verdicts"]]
    assert causes == ([("input_bound", [1])] if word == "wrong" else [])


def test_an_input_that_takes_longer_than_the_timed_step_is_all_of_its_time() -> None:
    """It was 300 %."""
    spans = [
        Span(device=str(rank), rank=rank, plan_version=0, attempt=0, iteration=step, kind=kind, start_us=begin, wall_us=us)
        for step in range(10)
        for rank in range(2)
        for kind, begin, us in (("data_wait", 4000 * step, 3000), ("all_reduce", 4000 * step + 3000, 1000))
    ]
    timed = pl.DataFrame({"iteration": range(10), "iteration_us": [1000.0] * 10})
    (gap,) = gaps_of(msgspec.structs.replace(log_of(spans), iterations=timed), chunks=False)
    assert gap.startswith("100 % of the time of rank 1 is waiting for input")


def test_what_an_import_or_a_replay_leaves_out_is_a_gap() -> None:
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=2, micro_batches=8)
    spans = spans_of(plan, iterations=20, spread=0.02)
    whole = diagnose(log_of(spans))
    assert "operations that most have" not in whole.why
    torn = diagnose(log_of([span for span in spans if span.micro_batch != 3 or span.iteration >= 4]))
    assert (torn.outcome, "4 of 20 iterations lack operations that most have" in torn.why) == ("cannot_be_judged", True)
    fewer = diagnose(msgspec.structs.replace(log_of(spans), ranks=5))
    assert (fewer.outcome, "rank 4 left no record, of 5 ranks" in fewer.why) == ("cannot_be_judged", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "clock", "word", "why"),
    [
        ("nothing", (0.0001, 0.0), "well", ""),
        ("backward", (0.0001, 0.0), "wrong", ""),
        ("backward", (0.06, 0.0), "cannot_be_judged", "the clocks of ranks 0 and 1 are 60 ms apart"),
        ("nothing", (-0.02, 0.004), "cannot_be_judged", "ms, drifting, apart"),
    ],
)
def test_clocks_that_disagree_accuse_nobody_and_calm_nobody(
    tmp_path: Path, late: Part, clock: tuple[float, float], word: str, why: str
) -> None:
    """Rank 1's clock is ahead by so many seconds, and by so many more in each step: whether passes end together, and so hold
    waiting, is seen by clocks alone."""
    steps = [one._replace(begin=one.begin + (one.rank == 1) * (clock[0] + clock[1] * one.step)) for one in job(late)]
    found = outcome(tmp_path, "kineto", kineto(tmp_path / "traces", steps))
    assert (found[0], why in found[1]) == (word, True), found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("again", "word"), [(2, "well"), (10, "cannot_be_judged")])
def test_iterations_that_were_executed_again_are_said(tmp_path: Path, again: int, word: str) -> None:
    """By a job that went back to a checkpoint: of the earlier attempts nobody knows more than that they were."""
    steps = job("nothing", ranks=RANKS, steps=STEPS)
    reported = [one for one in steps if one.step < 30] + [one for one in steps if one.step >= 30 - again]
    source = table(tmp_path / "t.csv", reported, lambda _, row: row)
    found = outcome(tmp_path, "iteration-times", source)
    assert (found[0], "were executed again" in found[1]) == (word, word != "well"), found[1]
    (run,) = json.loads((tmp_path / "d.json").read_text())["runs"]
    assert any(f"{again} iterations from {30 - again} to 29 executed more than once" in one for one in run["abstained"])


@pytest.mark.slow
@pytest.mark.parametrize("late", ["nobody", "rank 1", "all"])
def test_time_between_iterations_is_time_that_nobody_looked_at(tmp_path: Path, late: str) -> None:
    """Two of five milliseconds pass between steps, or one rank is late there and the others wait for it in their all-reduce."""
    steps = [
        one._replace(begin=one.begin + 0.002 * one.step, wait=one.wait + 0.002 * (late == "rank 1" and one.rank != 1))
        if late == "all" or one.rank == 1
        else one._replace(begin=one.begin + 0.002 * max(one.step - 1, 0), wait=one.wait + 0.002 * (one.step > 0))
        for one in job("nothing", ranks=RANKS, steps=STEPS)
    ]
    if late == "nobody":
        steps = job("nothing", ranks=RANKS, steps=STEPS)
    word, why = outcome(tmp_path, "kineto", kineto(tmp_path / "traces", steps))
    sentence = "of the time of rank"
    assert (word, sentence in why) == (("well", False) if late == "nobody" else ("cannot_be_judged", True)), why


def steps_us(seed: int, *, meet: bool, n_ranks: int = 6, steps: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Steps [iteration, rank] and their begins, of ranks that wait for the slowest in each, or for nobody."""
    took = 1000.0 * np.exp(np.random.default_rng(seed).normal(0, 0.1, (steps, n_ranks)))
    us = np.broadcast_to(took.max(axis=1, keepdims=True), took.shape).copy() if meet else took
    us += np.random.default_rng(seed + 1).normal(0, 1.0, us.shape)
    return us, np.vstack([np.zeros(n_ranks), np.cumsum(us, axis=0)[:-1]])


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_is_set_makes_nobody_independent(seed: int) -> None:
    us, begun = steps_us(seed, meet=True)
    begun[40:, 2] += 5e6
    assert "stay in step" in why_in_step(us, begun)
    free_us, free_begun = steps_us(seed, meet=False)
    free_begun[40:, 2] += 5e6
    assert why_in_step(free_us, free_begun) == ""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n_odd", [1, 2, 3, 4, 5])
def test_ranks_of_which_some_are_timed_without_their_input_still_wait_for_each_other(seed: int, n_odd: int) -> None:
    us, _ = steps_us(seed, meet=True)
    us[:, :n_odd] -= np.random.default_rng(seed).exponential(100.0, (len(us), n_odd))
    assert "wait for each other" in why_in_step(us)
    assert why_in_step(steps_us(seed, meet=False)[0]) == ""
