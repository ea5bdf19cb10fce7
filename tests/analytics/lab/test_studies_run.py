"""Studies: resumable, side by side with the paper; `unskew simulate` and `unskew study` as people call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import polars as pl
import pytest
from support.training.runtime_runs import SMALL, light
from typer.testing import CliRunner

from unskew.analytics.core.code_hash import hash_of
from unskew.analytics.core.faults import parse_faults
from unskew.analytics.lab.studies.frame import Cell, Figures, Study
from unskew.analytics.lab.studies.registry import STUDIES
from unskew.analytics.lab.studies.resihp import mixed, table6
from unskew.analytics.lab.studies.scale import SCALE
from unskew.analytics.policies.nothing import NothingPolicy
from unskew.cli import app
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.run_study import StudyResult, run_study
from unskew.runtime.control.launch import run as train

CALLS: list[int] = []


def _measure(cell: Cell) -> Figures:
    CALLS.append(cell.seed)
    return {"twice": 2.0 * cell.seed, "none": None}


TWICE = Study(
    name="twice", about="a study of nothing", cells=lambda seeds: [Cell(study="twice", name="a", seed=s) for s in range(seeds)],
    measure=_measure, paper={"twice": 4.0}, why=lambda figure, _paper, _ours: f"why {figure}",
)  # fmt: skip


def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path) -> None:
    CALLS.clear()

    def stop_after_three(done: int, _all: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(TWICE, seeds=5, out=tmp_path, on_cell=stop_after_three)
    assert CALLS == [0, 1, 2]
    result = run_study(TWICE, seeds=5, out=tmp_path)
    assert CALLS == [0, 1, 2, 3, 4]
    row = result.rows[0]
    assert (row.paper, row.ours, row.n, row.ratio, row.why) == (4.0, 4.0, 5, 1.0, "why twice")
    assert row.low == pytest.approx(4.0 - 2.776 * 2**0.5, abs=1e-3)  # t(4) x sqrt(10 / 5)
    assert result.rows[1].ours is None
    assert pl.read_parquet(tmp_path / "twice" / "points.parquet").height == 10
    assert "plotly" in (tmp_path / "twice" / "plot.html").read_text().lower()


@pytest.mark.limit(120)
def test_scale_has_every_policy_at_every_size_and_draws_the_growth_without_a_network(tmp_path: Path) -> None:
    sizes = (256, 1024)
    cells = [Cell(study="scale", name=f"{size} GPUs", seed=1, params={"size": size}) for size in sizes]
    result = run_study(msgspec.structs.replace(SCALE, cells=lambda _seeds: cells), seeds=1, out=tmp_path)
    effective = {row.figure: row.ours for row in result.rows if "seconds" not in row.figure}
    assert len(effective) == len(sizes) * 6
    assert all(value is not None and 50.0 < value < 100.001 for value in effective.values())
    page = (tmp_path / "scale" / "plot.html").read_text()
    assert (tmp_path / "plotly.min.js").stat().st_size > 10**6
    assert "../plotly.min.js" in page
    assert "https://cdn" not in page
    assert all(f'"name":"{policy}"' in page for policy in ("oobleck", "ft-hsdp", "unskew"))


def test_a_kept_cell_is_void_when_any_module_or_shipped_table_has_changed_and_not_with_a_store(tmp_path: Path) -> None:
    code, data = tmp_path / "analytics", tmp_path / "data"
    (code / "studies").mkdir(parents=True)
    (data / "store").mkdir(parents=True)
    found = {hash_of(code, data)}
    for path in (code / "pipeline.py", data / "noise.toml", code / "studies" / "scale.py", data / "store" / "own.toml"):
        path.write_text("x = 1\n")
        found.add(hash_of(code, data))
    assert len(found) == 4


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_session_that_aborts_counts_as_what_it_trained_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of 16 GPUs dies after half of a session of four hours, or of eight with a kill every half hour in turn."""
    nothing = dict.fromkeys(("oobleck", "recycle", "resihp", "unskew", "joint"), NothingPolicy)
    monkeypatch.setattr(table6, "_KILLED", nothing)
    monkeypatch.setattr(mixed, "MIXED", nothing)
    cell = Cell(study="resihp", name="L7B 2h", seed=0, params={"model": "L7B", "interval": "2h"})
    of_deaths = table6.TABLE_6.measure(cell)
    assert of_deaths["L7B 2h recycle"] == pytest.approx(0.5, abs=0.01)
    assert of_deaths["L7B 2h recycle: sessions that aborted"] == 1.0
    of_both = mixed.FIGURE_10.measure(cell)
    assert of_both["L7B 2h recycle: sessions that aborted"] == 1.0
    assert of_both["L7B 2h joint"] == 1.0


@pytest.mark.slow
def test_processes_measure_the_same(tmp_path: Path) -> None:
    """In a process of its own: joblib's helpers live as long as their parent."""
    one = run_study(STUDIES["resihp-fig2"], seeds=1, out=tmp_path / "one")
    call = ["study", "resihp-fig2", "--jobs", "2", "--out", str(tmp_path / "two"), "--json", str(tmp_path / "two.json")]
    subprocess.run([sys.executable, "-m", "unskew", *call], check=True, capture_output=True)
    assert msgspec.json.decode((tmp_path / "two.json").read_bytes(), type=StudyResult).rows == one.rows


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_study_prints_paper_ours_and_why(tmp_path: Path) -> None:
    answer = tmp_path / "a.json"
    called = CliRunner().invoke(
        app, ["study", "recover", "--seeds", "1", "--out", str(tmp_path / "out"), "--json", str(answer)]
    )
    assert called.exit_code == 0, called.output
    rows = {row["figure"]: row for row in json.loads(answer.read_text())["rows"]}
    printed = {figure: row["paper"] for figure, row in rows.items() if row["paper"] is not None}
    assert printed == {"tokens over checkpoint and restart": 1.749, "micro-batches per step at the end": 8192}
    by_hand = rows["worked by hand from the rule: 63 replicas: G'"]
    assert (by_hand["ours"], by_hand["paper"]) == (131, None)  # the paper prints the rule and no numbers
    assert "why they differ" in called.output or "differ" in called.output


@pytest.mark.parametrize(
    "call",
    [
        ["study", "nothing"], ["study", "recover", "--seeds", "0"], ["simulate", "--policy", "pray"],
        ["simulate", "--faults", "x=1"], ["simulate", "--cluster", "none"], ["simulate", "--hours", "0"],
        ["simulate", "--faults", "trace:/none.csv"], ["simulate", "--policy", "resihp,unskew", "--spares", "1"],
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_sentence(call: list[str]) -> None:
    called = CliRunner().invoke(app, call)
    assert called.exit_code == 2
    assert "Traceback" not in called.output


def test_a_simulated_run_is_served_like_a_real_one(tmp_path: Path) -> None:
    answer = tmp_path / "a.json"
    called = CliRunner().invoke(
        app,
        ["simulate", "--cluster", "llama2-7b", "--policy", "resihp", "--hours", "6", "--seed", "2",
         "--faults", "mtbf_s=3600,repair_s=1800,slow_per_100_hours=50",
         "--store", str(tmp_path / "store"), "--json", str(answer)],
    )  # fmt: skip
    assert called.exit_code == 0, called.output
    [facts] = json.loads(answer.read_text())["policies"]
    total = facts["useful_s"] + sum(facts["lost_s"].values()) + facts["unexplained_s"]
    assert total == pytest.approx(6 * 3600.0)
    with open_store(Store.locate(tmp_path / "store")) as reader:
        [run] = reader.sql("select * from runs").to_dicts()
        assert (run["run"], run["clock"], run["status"], run["iterations"]) == (
            facts["run_id"],
            "virtual",
            "done",
            facts["iterations"],
        )
        iterations = reader.sql("select count(*) as n, sum(iteration_us) / 1e6 as s from iterations").to_dicts()[0]
        assert iterations["n"] == facts["iterations"]
        assert iterations["s"] == pytest.approx(
            facts["useful_s"] + sum(facts["lost_s"][c] for c in ("capacity", "imbalance")), rel=0.01
        )
        causes = set(reader.sql("select distinct cause from verdicts")["cause"])
        assert causes == {"dead", "slow_device"}
        ended = reader.sql("select until_iteration from verdicts where cause = 'slow_device' and until_iteration is not null")
        assert ended.height > 0
        assert reader.sql("select count(*) - count(distinct rank) as n from devices")["n"][0] == 0
        assert reader.sql("select count(*) as n from plans")["n"][0] == 1 + facts["changes"]
        assert reader.sql("select count(*) as n from faults")["n"][0] > 3


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.usefixtures("forked")
def test_a_real_runs_plans_are_played_against_what_it_measured(tmp_path: Path) -> None:
    """On the logical clock they are the same to 0.1 %, after a death too, but for the iteration that was begun again."""
    store = tmp_path / "store"
    faults = parse_faults(["kill:rank=1,at=20"], ranks=4, iterations=40)
    options = light(msgspec.structs.replace(SMALL, layers=8, micro_batches=8, iterations=40, store=str(store), faults=faults))
    summary = train(options)
    answer = tmp_path / "a.json"
    called = CliRunner().invoke(app, ["simulate", "--check", summary.run_id, "--store", str(store), "--json", str(answer)])
    assert called.exit_code == 0, called.output
    plans = json.loads(answer.read_text())["plans"]
    assert len(plans) >= 2
    assert sum(plan["n"] + plan["redone"] for plan in plans) == 40
    assert sum(plan["redone"] for plan in plans) >= 1
    assert max(plan["error_percent"] for plan in plans if plan["n"]) < 0.1
    unknown = CliRunner().invoke(app, ["simulate", "--check", "nobody", "--store", str(store)])
    assert unknown.exit_code == 2
