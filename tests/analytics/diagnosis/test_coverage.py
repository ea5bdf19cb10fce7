"""What nobody recorded is no reason for calm: a missing rank, empty times, time outside what was timed, all but one slow."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.ddp_job import RankStep, job, kineto
from typer.testing import CliRunner

from unskew.analytics.diagnosis.ranks.lockstep import why_in_step
from unskew.cli import app

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


@pytest.mark.parametrize("name", LACKING)
def test_what_nobody_saw_is_said_and_nobody_is_calm(tmp_path: Path, name: str) -> None:
    change, why = LACKING[name]
    found = outcome(tmp_path, "iteration-times", table(tmp_path / "t.csv", job("nothing", ranks=RANKS, steps=STEPS), change))
    assert found[0] == "cannot_be_judged"
    assert why in found[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_whole_recording_of_a_healthy_job_is_well(tmp_path: Path, seed: int) -> None:
    steps = job("nothing", ranks=RANKS, steps=STEPS, seed=seed)
    assert outcome(tmp_path, "iteration-times", table(tmp_path / "t.csv", steps, lambda _, row: row))[0] == "well"


def test_the_declared_size_of_the_job_shows_that_a_file_is_missing(tmp_path: Path) -> None:
    folder = kineto(tmp_path / "traces", job("backward", ranks=3))
    (folder / "rank-1.json").unlink()
    assert outcome(tmp_path, "kineto", folder) == ("cannot_be_judged", "rank 1 left no record, of 3 ranks")


def test_one_rank_of_many_is_not_little(tmp_path: Path) -> None:
    """Who is missing may be the slow one, however many are there."""
    steps = [one for one in job("nothing", ranks=16, steps=STEPS) if one.rank != 5]
    found = outcome(tmp_path, "iteration-times", table(tmp_path / "t.csv", steps, lambda _, row: row))
    assert (found[0], "rank 5 left no record, of 16 ranks" in found[1]) == ("cannot_be_judged", True)


def test_input_that_only_collectives_stand_beside_is_not_left_out_in_silence(tmp_path: Path) -> None:
    def keep(_: RankStep, row: list[Cell]) -> list[Cell]:
        return put(put(row, 4, ""), 5, "")

    steps = job("loader", ranks=RANKS, steps=STEPS, late_s=0.002)
    found = outcome(tmp_path, "iteration-times", table(tmp_path / "t.csv", steps, keep))
    assert found[0] == "cannot_be_judged"
    assert "of the time of rank 1 is waiting for input" in found[1]


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
@pytest.mark.parametrize("n_odd", [1, 2, 3, 4])
def test_ranks_of_which_some_are_timed_without_their_input_still_wait_for_each_other(seed: int, n_odd: int) -> None:
    us, _ = steps_us(seed, meet=True)
    us[:, :n_odd] -= np.random.default_rng(seed).exponential(100.0, (len(us), n_odd))
    assert "wait for each other" in why_in_step(us)
    assert why_in_step(steps_us(seed, meet=False)[0]) == ""
