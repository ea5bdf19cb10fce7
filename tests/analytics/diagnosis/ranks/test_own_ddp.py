"""A data-parallel job that is not ours, one rank late from its first step on: the right rank and cause, or no calm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
from support.datasets import dataset
from support.jobs.ddp_job import LATE, Part, chunk_table, job, kineto, step_table
from support.jobs.pace import times_as_long
from support.paths import ROOT
from typer.testing import CliRunner

from unskew.cli import app

PARTS: tuple[Part, ...] = get_args(Part)
EXAMPLES = ROOT / "examples"
CAUSES = {"loader": "input_bound", "forward": "slow_device", "backward": "slow_device"}


def diagnosed(tmp_path: Path, form: str, source: Path, name: str = "own") -> dict[str, Any]:
    """What import and diagnose, as in a shell, say of a recording."""
    store, found = str(tmp_path / "store"), tmp_path / "d.json"
    for arguments in (["import", form, str(source), "--run", name], ["diagnose", name, "--json", str(found)]):
        done = CliRunner().invoke(app, [*arguments, "--store", store])
        assert done.exit_code == 0, done.output
    (run,) = json.loads(found.read_text())["runs"]
    return dict(run)


def named(run: dict[str, Any]) -> list[tuple[str, list[int | None]]]:
    """Cause and ranks of each; None for a party that is no device."""
    return [(verdict["cause"], [party.get("rank") for party in verdict["culprits"]]) for verdict in run["verdicts"]]


def assert_right(run: dict[str, Any], part: Part) -> None:
    """Named by rank, cause and kind of work; a healthy job is well, down to a slowdown that is stated."""
    if part == "nothing":
        assert (run["outcome"], run["verdicts"]) == ("well", []), run["why"]
        assert 1 < run["smallest_slowdown"] < 2
        return
    assert run["outcome"] == "wrong"
    assert named(run) == [(CAUSES[part], [LATE])]
    (verdict,) = run["verdicts"]
    if part != "loader":
        assert set(verdict["speed"]) == {"F" if part == "forward" else "B"}
    assert verdict["since_iteration"] == 0
    assert all(seconds > -0.05 * sum(run["time_lost_s"].values()) for seconds in run["time_lost_s"].values())


def assert_never_falsely_calm(run: dict[str, Any], part: Part) -> None:
    """The late rank is named, or it cannot be judged; nobody else is accused."""
    assert all(LATE in ranks for _, ranks in named(run)), run["verdicts"]
    assert run["outcome"] == ("wrong" if run["verdicts"] else "cannot_be_judged"), run["why"]
    assert not run["verdicts"] or part != "nothing"
    assert all(seconds > -0.05 * sum(run["time_lost_s"].values()) for seconds in run["time_lost_s"].values())


def assert_only_what_was_recorded(run: dict[str, Any], store: Path) -> None:
    """A processor may change its pace by itself, by a quarter for 100 ms as seen here: who is named was that much slower."""
    assert run["outcome"] != "wrong" or run["verdicts"], run["why"]
    for verdict in run["verdicts"]:
        assert verdict["cause"] == "slow_device", verdict
        (culprit,), until = verdict["culprits"], verdict["until_iteration"] or 1 << 30
        for kind, speed in verdict["speed"].items():
            longer = times_as_long(store, run["run_id"], culprit["rank"], kind, (verdict["since_iteration"], until))
            assert longer * speed > 0.85, verdict["sentence"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("part", PARTS)
def test_profiler_traces_with_gloo_name_the_late_rank_and_its_cause(tmp_path: Path, part: Part, ranks: int) -> None:
    assert_right(diagnosed(tmp_path, "kineto", kineto(tmp_path / "traces", job(part, ranks=ranks, seed=ranks))), part)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_gradients_that_are_summed_in_several_buckets_are_no_delay(tmp_path: Path, part: Part) -> None:
    """Those of the last layers are while others are still to be computed, as of any model above a megabyte. What was left of
    the backward pass was taken for time in which nobody did anything, half of all: a healthy job could not be judged."""
    run = diagnosed(tmp_path, "kineto", kineto(tmp_path / "traces", job(part, ranks=3, seed=6), buckets=3))
    assert_right(run, part)
    assert run["time_lost_s"].get("launch_delays", 0.0) < 0.02 * 3 * sum(one.seconds for one in job(part)[::2])


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_traces_that_are_bare_lists_of_events_say_the_same(tmp_path: Path, part: Part) -> None:
    """Chrome's other form, which names no rank: the files do."""
    folder = kineto(tmp_path / "traces", job(part, ranks=2, seed=2))
    for file in folder.iterdir():
        file.write_text("\n" + json.dumps(json.loads(file.read_text())["traceEvents"]))
    assert_right(diagnosed(tmp_path, "kineto", folder), part)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("reduce_apart", [False, True])
def test_chunk_times_that_may_hold_the_all_reduce_accuse_no_victim(
    tmp_path: Path, part: Part, ranks: int, reduce_apart: bool
) -> None:
    table = chunk_table(tmp_path / "t.parquet", job(part, ranks=ranks, seed=10 + ranks), reduce_apart=reduce_apart)
    run = diagnosed(tmp_path, "straggler-analysis", table)
    if part == "forward" or (reduce_apart and part == "backward"):
        assert_right(run, part)
    elif not (reduce_apart and part == "nothing"):
        assert_never_falsely_calm(run, part)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("parts", [("data_wait", "forward", "backward", "all_reduce"), ("forward", "backward")])
def test_a_folder_of_tables_with_the_parts_of_a_step_is_one_run(tmp_path: Path, part: Part, parts: tuple[str, ...]) -> None:
    """Without the all-reduce apart, what is timed as the backward pass holds it."""
    apart, steps = "all_reduce" in parts, job(part, ranks=3, seed=21)
    (tmp_path / "tables").mkdir()
    for rank in range(3):
        own = [one if apart else one._replace(backward=one.backward + one.wait) for one in steps if one.rank == rank]
        step_table(tmp_path / "tables" / f"times-rank{rank}.csv", own, parts=parts, name_rank=False)
    run = diagnosed(tmp_path, "iteration-times", tmp_path / "tables")
    assert run["iterations"] == 14
    (assert_right if apart or part == "forward" else assert_never_falsely_calm)(run, part)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("steps", [14, 120])
def test_step_times_of_ranks_that_wait_for_each_other_cannot_be_judged(
    tmp_path: Path, part: Part, ranks: int, steps: int
) -> None:
    run = diagnosed(tmp_path, "iteration-times", step_table(tmp_path / "t.csv", job(part, ranks=ranks, steps=steps)))
    assert (run["outcome"], run["verdicts"]) == ("cannot_be_judged", []), run["why"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_neither_can_steps_timed_without_the_part_in_which_one_is_late(tmp_path: Path, ranks: int) -> None:
    """Then the victims' times are long, and the culprit's short."""
    steps = [one._replace(loader=0.0) for one in job("loader", ranks=ranks, steps=60)]
    run = diagnosed(tmp_path, "iteration-times", step_table(tmp_path / "t.csv", steps))
    assert (run["outcome"], run["verdicts"]) == ("cannot_be_judged", []), run["why"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "slow"), [(1, {6}), (3, {6, 7, 8, 9})])
def test_workers_that_wait_for_nobody_are_judged_by_their_step_times(tmp_path: Path, number: int, slow: set[int]) -> None:
    """Of job 2, in which nobody is slow, the data set has no times: the file's name says 1-3, its rows are of jobs 1 and 3."""
    table = pl.read_parquet(dataset("alibaba-minibatch", "minibatch-jobs-1-3.parquet")).filter(pl.col("job") == number)
    steps = table.drop_nulls().select(pl.col("time").alias("step"), pl.col("worker").alias("rank"), seconds="batch_time_norm")
    steps.write_csv(tmp_path / "t.csv")
    run = diagnosed(tmp_path, "iteration-times", tmp_path / "t.csv")
    assert {rank for _, ranks in named(run) for rank in ranks} == slow
    assert {cause for cause, _ in named(run)} == {"slow_device"}, "a worker alone is no slowdown of the whole job"


@pytest.mark.alone
@pytest.mark.limit(120)
@pytest.mark.parametrize(("part", "micro_batches"), [*((part, 1) for part in PARTS), ("nothing", 4), ("backward", 4)])
def test_a_real_job_under_torchrun_recorded_as_the_guide_says(tmp_path: Path, part: Part, micro_batches: int) -> None:
    """By the profiler, and by a table with the backward pass timed apart from the all-reduce; of several micro-batches the
    gradients are accumulated, and reduced in the last one's backward pass."""
    accumulated = ["--micro-batches", str(micro_batches)]
    slow = [str(EXAMPLES / "profile_ddp.py"), str(tmp_path), "--slow", part, *accumulated]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *slow]
    done = subprocess.run(torchrun, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr
    for form, recorded in (("kineto", "traces"), ("iteration-times", "tables")):
        run = diagnosed(tmp_path, form, tmp_path / recorded, recorded)
        if part == "nothing":
            assert_only_what_was_recorded(run, tmp_path / "store")
            continue
        costliest = run["verdicts"][0]
        assert named(run)[0] == (CAUSES[part], [LATE])
        assert all(ranks == [LATE] for cause, ranks in named(run) if cause == "slow_device")
        assert part == "loader" or min(costliest["speed"], key=costliest["speed"].get) == part[0].upper()
