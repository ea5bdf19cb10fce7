"""Saved queries run on any store, say what they tell, and are right about a run whose answers are known."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner, Result

import unskew
from unskew.cli import app
from unskew.collector import events as ev
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.read.saved_queries import saved_queries
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

SLOW_FROM, ITERATIONS, RANKS = 10, 30, 2


def write(store: Store, run: str, *, slow: int | None) -> None:
    """A run of two devices; of device-`slow` every iteration from 10 on takes 300 us instead of 100 us."""
    stream = ControlStream(store, run, "control", "controller.1")
    started = ev.RunStarted(
        run=run, device="sleep", clock="monotonic", mode="auto", ranks=RANKS, options={}, code="", version=""
    )
    stream.append(
        0,
        [started, *(ev.DeviceJoined(device=f"device-{rank}", rank=rank, node="n", pid=1) for rank in range(RANKS))],
        actor="c",
    )
    writer = SpoolWriter(store, run, "rank-0000.1")
    for iteration in range(ITERATIONS):
        late = slow is not None and iteration >= SLOW_FROM
        for rank in range(RANKS):
            commit = ev.IterationCommitted(
                iteration=iteration,
                plan_version=0,
                attempt=0,
                rank=rank,
                loss=1.0,
                tokens=50,
                start_us=0,
                wall_us=300 if late else 100,
                log_complete=True,
            )
            writer.append(commit)
        ratios = tuple(
            ev.RankRatio(rank=rank, measured_us=180 if late and rank == slow else 60, healthy_us=60) for rank in range(RANKS)
        )
        writer.append(ev.IterationJudged(iteration=iteration, plan_version=0, measured_us=300, predicted_us=100, ranks=ratios))
    writer.append(ev.Dropped(count=11))
    assert writer.close(10.0)
    if slow is not None:
        stream.append(
            stream.version,
            [
                ev.Verdict(verdict=1, cause="slow_device", culprits=(ev.Party(kind="device", rank=slow),), speed={"F": 0.33},
                           since_iteration=SLOW_FROM, at_iteration=12, confidence=0.9, sentence="slow", evidence={}),
                ev.DeviceLost(device=f"device-{slow}", rank=slow, how="exit", detail="", detected_us=1),
            ],
            actor="c",
        )  # fmt: skip
        written = ControlStream(store, run, "analysis/diagnose", "diagnose")
        for seconds in (9.0, 0.5):  # what was said last counts
            lost_s = {"slow_device": seconds, "unexplained": -0.1}
            diagnosed = ev.Diagnosed(observability="chunks", verdicts=(), time_lost_s=lost_s, abstained=())
            written.append(written.version, [diagnosed], actor="diagnose")
        written.close()
    stream.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("store"))
    write(store, "a", slow=1)
    write(store, "b", slow=1)
    write(store, "c", slow=None)
    return store


@pytest.fixture(scope="module")
def answers(store: Store) -> dict[str, pl.DataFrame]:
    with open_store(store) as reader:
        return {name: reader.sql(query.sql) for name, query in saved_queries().items()}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sql", *arguments])


def test_the_named_questions_have_a_saved_query_that_says_what_it_tells(answers: dict[str, pl.DataFrame]) -> None:
    assert set(answers) >= {
        "slowest_ranks",
        "longest_waits",
        "time_lost_per_cause",
        "time_over_usual_per_verdict",
        "effect_of_each_decision",
        "goodput",
        "device_history",
        "dropped",
    }
    assert all(query.description.endswith(".") for query in saved_queries().values())


def test_they_run_on_an_empty_store(tmp_path: Path) -> None:
    with open_store(tmp_path) as reader:
        assert {name: reader.sql(query.sql).height for name, query in saved_queries().items()} == dict.fromkeys(
            saved_queries(), 0
        )


def test_answers(answers: dict[str, pl.DataFrame]) -> None:
    slowest = answers["slowest_ranks"].row(0, named=True)
    assert (slowest["device"], slowest["slowdown"]) == ("device-1", round((10 * 60 + 20 * 180) / (30 * 60), 3))
    over = {(run, cause): over_s for run, cause, over_s, _ in answers["time_over_usual_per_verdict"].rows()}
    assert over == {(run, "slow_device"): pytest.approx(20 * RANKS * 200e-6, abs=1e-3) for run in "ab"}
    assert answers["time_lost_per_cause"].rows() == [
        ("a", "slow_device", 0.5), ("b", "slow_device", 0.5), ("a", "unexplained", -0.1), ("b", "unexplained", -0.1),
        ("c", None, None),
    ]  # fmt: skip
    history = answers["device_history"].row(0, named=True)
    assert (history["device"], history["n_runs"], history["n_runs_affected"], history["n_losses"], history["n_verdicts"]) == (
        "device-1", 3, 2, 2, 2,
    )  # fmt: skip
    assert (history["causes"], history["slowest"]) == ("slow_device", 0.33)
    assert answers["goodput"]["tokens"].to_list() == [50 * ITERATIONS] * 3
    assert answers["dropped"]["n_dropped"].to_list() == [11, 11, 11]


def test_goodput_counts_a_run_by_its_own_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run, clock in (("real", "monotonic"), ("simulated", "virtual")):
        stream = ControlStream(store, run, "control", "controller.1")
        started = ev.RunStarted(run=run, device="cpu", clock=clock, mode="auto", ranks=1, options={}, code="", version="")
        stream.append(0, [started], actor="c")
        writer = SpoolWriter(store, run, "rank-0000.1")
        for iteration in range(10):  # 9 s each, every 10 s: 99 s in all
            start_us = iteration * 10_000_000
            writer.append(ev.IterationCommitted(iteration=iteration, plan_version=0, attempt=0, rank=0, loss=1.0, tokens=99,
                                                start_us=start_us, wall_us=9_000_000, log_complete=True))  # fmt: skip
        assert writer.close(10.0)
        stream.append(stream.version, [ev.RunFinished(status="done", iterations=10)], actor="c")
        stream.close()
    query = saved_queries()["goodput"].sql
    with open_store(store) as reader:
        before = {row["run"]: row for row in reader.sql(query).iter_rows(named=True)}
        assert (before["simulated"]["elapsed_s"], before["simulated"]["tokens_per_s"]) == (99.0, 10.0)
        assert before["simulated"]["counted_percent"] == 90.9
        time.sleep(1.0)
        stream = ControlStream(store, "real", "analysis/diagnose", "diagnose")
        stream.append(0, [ev.Note(text="said long after the run", by="ada")], actor="diagnose")
        stream.close()
        reader.refresh()
        assert {row["run"]: row for row in reader.sql(query).iter_rows(named=True)} == before


def test_who_waited_is_told_where_the_waits_are_spans_and_where_they_are_amid_the_passes(tmp_path: Path) -> None:
    """DDP's are spans behind the backward pass, and every `wait_` of its chunks is NULL; FSDP's are in both."""
    store = Store(tmp_path)
    stream, writer = ControlStream(store, "a", "control", "controller.1"), SpoolWriter(store, "a", "rank-0000.1")
    started = ev.RunStarted(run="a", device="cpu", clock="monotonic", mode="observe", ranks=3, options={}, code="", version="")
    stream.append(0, [started], actor="c")
    for iteration, rank in product(range(12), range(3)):
        where = {"device": "", "rank": rank, "plan_version": 0, "attempt": 0, "iteration": iteration, "start_us": 0}
        amid_us = None if rank == 2 else 1000 * rank
        writer.append(ev.Span(**where, kind="B", wall_us=5000, wait_dp_us=amid_us))
        writer.append(ev.Span(**where, kind="all_reduce", wall_us=3000 if rank == 2 else 500, wait_dp_us=amid_us))
        writer.append(ev.IterationCommitted(iteration=iteration, plan_version=0, attempt=0, rank=rank, loss=1.0, tokens=9,
                                            start_us=0, wall_us=10_000, log_complete=True))  # fmt: skip
    assert writer.close(10.0)
    stream.close()
    with open_store(store) as reader:
        found = reader.sql(saved_queries()["longest_waits"].sql).rows()
    assert found == [("a", 2, 3.0, 30.0, 12), ("a", 1, 1.5, 15.0, 12), ("a", 0, 0.5, 5.0, 12)]


@pytest.mark.slow
def test_every_form_holds_the_same_rows_on_the_terminal_and_in_a_file(store: Store, tmp_path: Path) -> None:
    where = ("--store", str(store.root))
    query = "select iteration, loss from iterations where run = 'a' order by iteration"
    out = {form: tmp_path / f"rows.{form}" for form in ("csv", "json", "parquet", "table")}
    for form, file in out.items():
        assert call(query, "--format", form, "--out", str(file), *where).exit_code == 0
    expected = [(iteration, 1.0) for iteration in range(ITERATIONS)]
    assert pl.read_csv(out["csv"]).rows() == pl.read_parquet(out["parquet"]).rows() == expected
    assert [tuple(row.values()) for row in json.loads(out["json"].read_text())] == expected
    assert f"{ITERATIONS} rows" in out["table"].read_text()
    assert call(query, "--format", "csv", *where).stdout == out["csv"].read_text()
    assert "device-1" in call("--saved", "device_history", "--format", "csv", *where).stdout
    assert "slowest_ranks" in call("--list").stdout


@pytest.mark.slow
def test_no_word_or_number_is_cut_on_a_terminal_of_80_columns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    where = ("--store", str(store.root))
    narrow = call("select run, loss, iteration from iterations order by all limit 2", *where).stdout
    assert "row 1" not in narrow
    for view in ("runs", "devices", "verdicts", "iterations", "events"):
        query = f"select * from {view} where run = 'a' order by all limit 3"
        result = call(query, *where)
        assert result.exit_code == 0, result.stderr
        shown = result.stdout
        assert max(map(len, shown.splitlines())) <= 80
        with open_store(store) as reader:
            names, first = zip(*reader.sql(query).select(pl.exclude("payload", "options")).to_dicts()[0].items(), strict=True)
        words = set(shown.replace("│", " ").split())
        assert words >= set(names), view
        assert words >= {str(value) for value in first if isinstance(value, int)}, view
    wrapped = call("select 'one two three four ' || repeat('words ', 20) as said, 1234567890123456 as at_us", *where).stdout
    assert "row 1" not in wrapped
    assert "1234567890123456" in wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "name one query"),
        (("select 1", "--saved", "goodput"), "name one query"),
        (("--saved", "nope"), "there is no saved query 'nope', allowed: device_history"),
        (("select * from plan",), "there is no view plan: did you mean plans"),
        (("select count(*) from executed('nope')",), "there is no run nope"),
        (("select * from executed('nope') where times != 1",), "there is no run nope"),
        (("select 1", "--out", "/proc/nope/x"), "--out /proc/nope/x: there is no folder /proc/nope"),
    ],
)
def test_bad_usage_is_one_sentence(store: Store, arguments: tuple[str, ...], sentence: str) -> None:
    result = call(*arguments, "--store", str(store.root))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert sentence in result.stderr


def test_numbers_are_numbers_in_json(store: Store, tmp_path: Path) -> None:
    """DuckDB's sums are wider than 64 bits and 1.5 is a decimal; Polars writes both as text."""
    query, json_path = "select sum(range) as n, 1.5 as share from range(4)", tmp_path / "told.json"
    result = call(query, "--format", "json", "--json", str(json_path), "--store", str(store.root))
    assert json.loads(result.stdout) == json.loads(json_path.read_text()) == [{"n": 6, "share": 1.5}]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 1, 150_000])
def test_an_answer_is_written_in_slices_and_is_one(store: Store, tmp_path: Path, rows: int) -> None:
    out, json_path = tmp_path / "out.csv", tmp_path / "out.json"
    command = ("--format", "csv", "--out", str(out), "--json", str(json_path), "--store", str(store.root))
    assert call(f"select range as n from range({rows})", *command).exit_code == 0
    assert out.read_text().split() == ["n", *map(str, range(rows))]
    assert json.loads(json_path.read_text()) == [{"n": n} for n in range(rows)]


def test_the_bounds_of_an_effect_are_numbers(answers: dict[str, pl.DataFrame]) -> None:
    types = answers["effect_of_each_decision"].schema
    assert all(types[name] == pl.Float64 for name in ("saved_s", "at_least_s", "at_most_s"))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["table", "csv", "json"])
def test_what_a_form_cannot_hold_leaves_the_file_as_it_was(store: Store, tmp_path: Path, format: str) -> None:
    out, json_path = tmp_path / "out", tmp_path / "told.json"
    out.write_text("as it was")
    command = [sys.executable, "-m", "unskew", "sql", "select 'infinity'::timestamp as t", "--store", str(store.root)]
    command += ["--format", format, "--out", str(out), "--json", str(json_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), "not a stack of Polars besides"
    assert "cannot hold this answer" in result.stderr
    assert out.read_text() == "as it was"
    assert not json_path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["table", "csv", "json", "parquet"])
def test_a_full_disk_is_one_sentence(store: Store, format: str) -> None:
    result = call("select range from range(100000)", "--format", format, "--out", "/dev/full", "--store", str(store.root))
    assert result.exit_code == 1
    assert result.stderr == "--out /dev/full could not be written whole: No space left on device\n"


def test_the_log_opens_from_python_in_three_forms(store: Store) -> None:
    with unskew.open(store.root) as log:
        assert log.sql("runs").height == log.arrow("runs").num_rows == 3
        relation = log.duckdb("iterations").filter("run = 'a'").aggregate("count(*) as n")
        assert relation.fetchall() == [(ITERATIONS,)]
        write(store, "d", slow=None)
        log.refresh()
        assert log.sql("select count(*) from runs").item() == 4
