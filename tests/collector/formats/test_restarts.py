"""Logs of restarted jobs keep what was executed twice, and steps that count samples or tokens become iterations."""

from __future__ import annotations

import json
import random
from pathlib import Path

import polars
import pytest
from support.datasets import dataset
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.events import IterationTimed, SourceRecorded, Span
from unskew.collector.formats.importers import iteration_times, mlperf, torchtitan
from unskew.collector.formats.registry import FormatError, bring_in
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store


def table(*steps: int) -> str:
    return "step,seconds\n" + "".join(f"{step},{1 + place / 100}\n" for place, step in enumerate(steps))


def test_a_table_that_goes_back_keeps_both_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table(1, 2, 3, 4, 3, 4, 5, 4, 5))
    answer = CliRunner().invoke(app, ["import", "iteration-times", str(tmp_path / "t.csv"), "--store", str(tmp_path / "store")])
    assert "3 iterations from 3 to 5 are reported more than once" in answer.output
    assert "the 4 before are kept" in answer.output
    with open_store(Store.locate(tmp_path / "store")) as reader:
        counted = reader.sql("select iteration, attempt, iteration_us // 10_000 - 100 as row from iterations order by 1")
        kept = reader.sql("select count(*) as n from events where type = 'iteration_timed@1'")["n"].item()
    assert counted.rows() == [(1, 0, 0), (2, 0, 1), (3, 1, 4), (4, 2, 7), (5, 1, 8)]
    assert kept == 9


@pytest.mark.parametrize("format", ["mlperf", "iteration-times"])
@pytest.mark.parametrize(("until", "to", "word"), [(200, 75, "cannot be judged"), (200, 185, "well")])
def test_a_restart_between_two_lines_is_stated_and_never_calm_where_it_is_long(
    format: str, until: int, to: int, word: str, tmp_path: Path
) -> None:
    """Every tenth step is reported; no step is reported again."""
    noise = random.Random(3)
    steps = [*range(10, until + 1, 10), *range(to, 400, 10)]
    times = [noise.gauss(1, 0.01) for _ in steps]
    rows = [f"{step},{seconds}\n" for step, seconds in zip(steps, times, strict=True)]
    lines = [
        mllog("tracked_stats", {"train_step_time": seconds}, 10_000.0 * place, step=step)
        for place, (step, seconds) in enumerate(zip(steps, times, strict=True))
    ]
    source = tmp_path / ("t.csv" if format == "iteration-times" else "t.log")
    source.write_text("".join(["step,seconds\n", *rows] if format == "iteration-times" else lines))
    store = ["--store", str(tmp_path / "store")]
    answer = CliRunner().invoke(app, ["import", format, str(source), *store])
    assert f"it goes back from iteration {until} to {to}, which it had not reported" in " ".join(answer.output.split())
    found = " ".join(CliRunner().invoke(app, ["diagnose", *store]).output.split()).lower()
    assert f"{word}: " in found
    assert f"whether iterations from {to} to {until} count" in found


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("back", [3, 10, 19])
def test_a_restart_by_less_than_one_line_distance_is_stated(times: int, back: int, tmp_path: Path) -> None:
    """A line every twenty steps, counted in sequences of 48 to a step. The line before a restart was taken for the mean of a
    block, and both attempts were one series."""
    steps, restarts, noise = [*range(20, 600, 20)], list[tuple[int, int]](), random.Random(back)
    for _ in range(times):
        restarts.append((steps[-1] - back, steps[-1]))
        steps += range(steps[-1] - back, steps[-1] + 600, 20)
    lines = [mllog("global_batch_size", 48, 0.0)]
    for place, step in enumerate(steps):
        stats = {"train_step_time": noise.gauss(2, 0.02)}
        lines.append(mllog("tracked_stats", stats, 40_000.0 * place, samples_count=48 * step))
    (tmp_path / "t.log").write_text("".join(lines))
    (run,) = mlperf.read(tmp_path / "t.log")
    assert run.facts["went_back"] == restarts
    assert [note.split(",")[0] for note in run.notes if "it goes back" in note] == [
        f"it goes back from iteration {since} to {to}" for to, since in restarts
    ]
    assert [event.iteration for event in run.events if isinstance(event, IterationTimed)] == steps


@pytest.mark.parametrize(("passed", "stated"), [(40_000.0, True), (190_000.0, True), (14_000.0, False)])
def test_a_line_that_comes_early_after_the_time_of_a_whole_distance_is_a_restart(
    passed: float, stated: bool, tmp_path: Path
) -> None:
    """Every twenty steps of 2 s, then one seven steps on. Seven steps later it is a line out of turn, no restart."""
    steps = [*range(20, 600, 20), *range(587, 1100, 20)]
    lines, at_ms = [mllog("global_batch_size", 48, 0.0)], 0.0
    for step in steps:
        at_ms += passed if step == 587 else 40_000.0
        lines.append(mllog("tracked_stats", {"train_step_time": 2.0}, at_ms, samples_count=48 * step))
    (tmp_path / "t.log").write_text("".join(lines))
    (run,) = mlperf.read(tmp_path / "t.log")
    assert run.facts["went_back"] == ([(567, 580)] if stated else [])
    assert any("restarted from iteration 567 or later" in note for note in run.notes) == stated


def test_what_counts_is_the_last_attempt_wherever_the_log_is_cut(tmp_path: Path) -> None:
    """Half of it projected already, half not: a later attempt that was faster must not be hidden by the slower one."""
    (tmp_path / "t.csv").write_text("step,seconds,loss\n7,9.0,3\n8,9.0,3\n7,2.0,\n8,3.0,2\n")
    store = Store.locate(tmp_path / "store")
    bring_in(store, "iteration-times", tmp_path / "t.csv", "r")
    with open_store(store) as reader:
        found = reader.sql("select iteration, iteration_us, loss, n_ranks from iterations order by 1").rows()
    assert found == [(7, 2_000_000, None, 1), (8, 3_000_000, 2.0, 1)]


@pytest.mark.parametrize("steps", [(1, 1, 2, 2, 3, 3), (5, 5), (1, 1, 1, 2, 2, 2)])
def test_ranks_without_their_column_are_no_restart(tmp_path: Path, steps: tuple[int, ...]) -> None:
    (tmp_path / "t.csv").write_text(table(*steps))
    with pytest.raises(FormatError, match=r"row 2: the row before has the same step.* a column rank"):
        iteration_times.read(tmp_path / "t.csv")


def test_the_spans_of_an_attempt_that_was_cut_short_are_not_those_of_the_next(tmp_path: Path) -> None:
    def line(name: str, time_us: int, value: float | None = None) -> str:
        record = {"rank": 0, "source": "t", "step": 5, "log_type": "event", "log_type_name": name, "time_us": time_us}
        return json.dumps(record | ({} if value is None else {"value": value})) + "\n"

    before = line("step_start", 0) + line("fetching_batch_start", 0) + line("fetching_batch_end", 50, 0.05)
    after = line("step_start", 900) + line("fetching_batch_start", 900) + line("fetching_batch_end", 930, 0.03)
    (tmp_path / "t.global_rank_0.1.jsonl").write_text(before)
    (tmp_path / "t.global_rank_0.2.jsonl").write_text(after + line("step_end", 1900, 1.0))
    (run,) = torchtitan.read(tmp_path)
    events = list(run.events)
    assert [(one.attempt, one.wall_us) for one in events if isinstance(one, Span)] == [(0, 50), (1, 30)]
    assert [(one.attempt, one.wall_us) for one in events if isinstance(one, IterationTimed)] == [(1, 1000)]
    assert "reported more than once" in run.notes[0]


def mllog(key: str, value: object, at_ms: float, **metadata: object) -> str:
    return ":::MLLOG " + json.dumps({"time_ms": at_ms, "key": key, "value": value, "metadata": metadata}) + "\n"


def log(progress: list[int], steps_each: list[int], step_s: float, field: str = "step", **facts: int) -> str:
    """A log with a line after every so many steps, and an evaluation of ten steps' time after every fourth."""
    noise, at_ms = random.Random(len(progress)), 1e6
    lines = [mllog(name, value, at_ms) for name, value in facts.items()]
    for place, (step, count) in enumerate(zip(progress, steps_each, strict=True)):
        seconds = step_s * noise.uniform(0.97, 1.06)
        at_ms += 1e3 * (seconds * count + (10 * step_s if place % 4 == 3 else 0))
        lines.append(mllog("tracked_stats", {"train_step_time": seconds}, round(at_ms), **{field: step}))
    return "".join(lines)


N = 24
UNITS = {
    "iterations": (list(range(1, N)), 1, {"global_batch_size": 96}, ("iterations", 1)),
    "iterations, a line for as many as a batch has samples": ([96 * n for n in range(1, N)], 96, {"global_batch_size": 96},
                                                              ("iterations", 1)),
    "samples": ([96 * n for n in range(1, N)], 1, {"global_batch_size": 96}, ("samples", 96)),
    "samples, a line every fifth": ([5 * 96 * n for n in range(1, N)], 5, {"global_batch_size": 96}, ("samples", 96)),
    "tokens": ([96 * 2048 * n for n in range(1, N)], 1, {"global_batch_size": 96, "max_sequence_length": 2048},
               ("tokens", 96 * 2048)),
    "nobody says how many": ([640 * n for n in range(1, N)], 1, {}, ("samples or tokens", 640)),
}  # fmt: skip


@pytest.mark.parametrize("field", ["step", "samples_count"])
@pytest.mark.parametrize("name", UNITS)
def test_steps_that_count_something_else_become_iterations(tmp_path: Path, name: str, field: str) -> None:
    progress, every, facts, (counts, per_iteration) = UNITS[name]
    (tmp_path / "r.log").write_text(log(progress, [every] * len(progress), 0.8, field, **facts))
    (run,) = mlperf.read(tmp_path / "r.log")
    assert run.facts["step_unit"] == {"counts": counts, "per_iteration": per_iteration}
    found = [event.iteration for event in run.events if isinstance(event, IterationTimed)]
    assert found == [step // per_iteration for step in progress]
    assert [f"its steps count {counts}" in note for note in run.notes] == [True] * (per_iteration > 1)


def test_a_restart_that_counts_samples_goes_back_by_iterations(tmp_path: Path) -> None:
    progress = [64 * n for n in (*range(1, 15), *range(11, 20))]
    (tmp_path / "r.log").write_text(log(progress, [1] * len(progress), 2.0, global_batch_size=64))
    (run,) = mlperf.read(tmp_path / "r.log")
    attempts = {event.iteration: event.attempt for event in run.events if isinstance(event, IterationTimed)}
    assert [iteration for iteration, attempt in attempts.items() if attempt] == [11, 12, 13, 14]
    assert "4 iterations from 11 to 14 are reported more than once" in run.notes[1]


def of_ranks(ranks: int, steps: int, step_s: float) -> list[str]:
    """Lines of several ranks of a job, one after the other."""
    place = [(step, rank) for step in range(1, steps) for rank in range(ranks)]
    return [
        mllog("tracked_stats", {"train_step_time": step_s}, 1e6 + 1e3 * step_s * s + r, rank=r, samples_count=64 * s)
        for s, r in place
    ]


def test_lines_of_several_ranks_are_no_restarts(tmp_path: Path) -> None:
    """Each rank's step was taken for the same step once more, so that every iteration had been executed four times."""
    (tmp_path / "r.log").write_text("".join(of_ranks(4, 20, 0.5)))
    (run,) = mlperf.read(tmp_path / "r.log")
    timed = [event for event in run.events if isinstance(event, IterationTimed)]
    assert (run.ranks, run.iterations, run.facts["told_again"], run.facts["step_unit"]["per_iteration"]) == (4, 19, 0, 64)
    assert {(one.rank, one.iteration, one.attempt) for one in timed} == {(r, s, 0) for r in range(4) for s in range(1, 20)}


@pytest.mark.parametrize("cut", [1, 9, 40, 100])
@pytest.mark.parametrize("goes_on", ["", "\n", "in the same line"])
def test_what_a_killed_process_wrote_last_is_passed_over(tmp_path: Path, cut: int, goes_on: str) -> None:
    """A log that is cut in the middle was refused as a whole; behind the cut the restarted job may go on."""
    whole = of_ranks(1, 30, 0.5)
    text = "".join(whole[:15])[: -cut - 1] + (goes_on and goes_on.replace("in the same line", "") + "".join(whole[10:]))
    (tmp_path / "r.log").write_text(text)
    (run,) = mlperf.read(tmp_path / "r.log")
    assert run.notes[-1] == "line 15 is cut short, as by a process that was killed, and passed over"
    assert (run.iterations, run.facts["told_again"]) == ((29, 4) if goes_on else (14, 0))


def test_a_record_that_torchtitan_did_not_finish_is_passed_over(tmp_path: Path) -> None:
    record = {"rank": 0, "source": "t", "log_type": "event", "log_type_name": "step_end", "value": 1.0}
    lines = [json.dumps(record | {"step": step, "time_us": 1000 * step}) + "\n" for step in range(1, 9)]
    (tmp_path / "t.global_rank_0.1.jsonl").write_text("".join(lines)[:-20])
    (run,) = torchtitan.read(tmp_path)
    assert (run.iterations, run.notes[-1][:40]) == (7, "t.global_rank_0.1.jsonl: line 8 is cut s")


@pytest.mark.parametrize(
    ("benchmark", "counts", "per_iteration"), [("gpt3", "tokens", 2048 * 2048), ("llama31_405b", "samples", 1536)]
)
def test_published_mlperf_logs_are_numbered_by_iterations(
    tmp_path: Path, benchmark: str, counts: str, per_iteration: int
) -> None:
    runs = polars.read_csv(dataset("mlperf-steptimes", "runs.csv"), infer_schema_length=None)
    about = runs.filter((polars.col("benchmark") == benchmark) & (polars.col("submitter") == "NVIDIA")).row(-1, named=True)
    run = published(tmp_path, about)
    assert run.facts["step_unit"]["counts"] == counts
    assert benchmark != "gpt3" or run.facts["step_unit"]["per_iteration"] == per_iteration
    found = [event.iteration for event in run.events if isinstance(event, IterationTimed)]
    assert found == list(range(1, about["n_train_steps"] + 1))


def test_the_mean_of_a_block_in_a_published_log_is_no_iteration(tmp_path: Path) -> None:
    """The 8B logs repeat one step for every block between evaluations, out of line."""
    runs = polars.read_csv(dataset("mlperf-steptimes", "runs.csv"), infer_schema_length=None)
    about = runs.filter(polars.col("benchmark") == "llama31_8b").row(0, named=True)
    run = published(tmp_path, about)
    found = [event.iteration for event in run.events if isinstance(event, IterationTimed)]
    means = [event for event in run.events if isinstance(event, SourceRecorded) and event.name == "mean step time of a block"]
    assert found == sorted(set(found))
    assert len(found) + len(means) == about["n_train_steps"]
    assert means
    assert run.notes == ()


def published(folder: Path, about: dict[str, object]) -> mlperf.ImportedRun:
    """A published run's log again, of the lines that its table was made from."""
    steps = polars.read_parquet(dataset("mlperf-steptimes", "steps.parquet"))
    steps = steps.filter((polars.col("run_id") == about["run_id"]) & (polars.col("kind") == "train")).sort("seq")
    lines = [mllog(name, about[name], 0) for name in ("global_batch_size", "max_sequence_length")]
    for at_ms, progress, seconds in steps.select("time_ms", "progress", "step_time_s").iter_rows():
        lines.append(mllog("tracked_stats", {"train_step_time": seconds}, at_ms, step=int(progress)))
    (folder / "r.log").write_text("".join(lines))
    (run,) = mlperf.read(folder / "r.log")
    return run
