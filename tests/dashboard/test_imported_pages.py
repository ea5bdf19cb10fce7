"""The page of what was imported: no loss, tokens or plan where the source has none."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from streamlit.testing.v1 import AppTest
from support.dashboard.pages import FOLDER, page, text

from unskew.collector.events import Diagnosed
from unskew.collector.formats.importers.straggler_analysis import COLUMNS
from unskew.collector.formats.registry import bring_in
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream
from unskew.dashboard import data
from unskew.dashboard.panels import skew
from unskew.dashboard.window import around, newest


def brought_in(store: Store, form: str, path: Path) -> AppTest:
    """The page of a run that was imported, with an iteration chosen."""
    (stored,) = bring_in(store, form, path)
    app = AppTest.from_file(str(FOLDER / "streamlit_app.py"), default_timeout=30)
    app.query_params["run"] = stored.run
    app.query_params["iteration"] = "7"
    app.query_params["record"] = "Events"
    app.run()
    assert not app.exception, app.exception
    return app


@pytest.mark.slow
def test_an_imported_trace_has_a_page_without_loss_tokens_and_plan(store: Store, tmp_path: Path) -> None:
    rows = {
        "dp_rank": [0] * 4,
        "stage": [0, 0, 1, 1],
        "rank": [0, 0, 4, 4],
        "step": [7] * 4,
        "optype": ["forward-compute", "forward-send", "forward-recv", "forward-compute"],
        "start_ts": [0.0, 0.1, 0.05, 0.15],
        "duration": [0.1, 0.05, 0.1, 0.2],
        "seq_id": [0] * 4,
        "mc": [0, -1, -1, 0],
        "mb_id": [0, -1, -1, 0],
        "gmc": [0, -1, -1, 1],
    }
    pl.DataFrame(rows, schema_overrides=COLUMNS).write_parquet(tmp_path / "trace.parquet")
    app = brought_in(store, "straggler-analysis", tmp_path / "trace.parquet")
    assert {metric.label: metric.value for metric in app.metric} == {
        "Iterations": "1",
        "Loss": "–",
        "Tokens per second": "–",
        "Iteration time": "300 ms",
        "Ranks": "2",
    }
    assert "Cannot be judged: nobody has judged this imported run yet." in text(app)
    assert "chunks matched iteration" not in text(app)
    assert not [chart for chart in app.get("echarts_chart") if chart.proto.alt == "Line chart of the loss"]
    (asked,) = [code.value for code in app.code]
    assert asked.startswith("unskew diagnose ")

    measure, beside = data.beside_peers(asked.split()[2], 7, 7, 1)
    assert measure == "compute"
    assert beside.select("rank", "measured_us", "reference_us").rows() == [(0, 100_000, 150_000), (4, 200_000, 150_000)]


@pytest.mark.slow
def test_a_diagnosis_made_afterwards_stands_on_the_page(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("step,rank,seconds\n7,0,1.5\n7,1,1.25\n")
    (stored,) = bring_in(store, "iteration-times", tmp_path / "t.csv")
    verdict = {
        "cause": "stage_imbalance",
        "sentence": "stage 3 takes 1.63 times as long",
        "evidence": {"next_step": "move layers"},
    }
    found = Diagnosed(
        observability="chunks",
        verdicts=(verdict,),
        time_lost_s={"stage_imbalance": 76.0, "unexplained": 0.001},
        abstained=("dead",),
    )
    stream = ControlStream(store, stored.run, "analysis/diagnose", "diagnose")
    stream.append(stream.version, [found], actor="diagnose")
    stream.close()
    shown = text(page(stored.run))
    assert shown.count("Stage 3 takes 1.63 times as long.") == 2, "in the headline and in the card"
    assert "Next: move layers" in shown
    assert "76.0 s" in shown
    assert "<span>unexplained</span>" not in shown


def test_iterations_with_gaps_stand_side_by_side() -> None:
    recorded = [1, *range(5, 1000, 5), 4000]
    window = newest(recorded, 60)
    assert 60 <= len(window.iterations) <= 66
    assert window.first % 5 == 0
    rows = window.placed(pl.DataFrame({"iteration": recorded, "loss": recorded}))
    assert rows["x"].to_list() == list(range(len(window.iterations)))
    assert rows["loss"][-1] == 4000
    assert [window.position(number) for number in (window.first, 995, 996, 4000)] == [
        0, len(rows) - 2, len(rows) - 1, len(rows) - 1
    ]  # fmt: skip
    assert around(recorded, 500, 3).iterations == (485, 490, 495, 500, 505, 510, 515)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "loss", "ranks"),
    [
        ("step,seconds\n7,1.5\n8,1.25\n", "–", "–"),
        ("step,seconds,loss\n7,1.5,3.25\n8,1.25,\n", "–", "–"),
        (
            "step,rank,seconds,loss,tokens\n7,0,1.5,3.25,100\n7,1,1.25,3.25,100\n8,0,1.25,3.5,100\n8,1,1.25,3.5,100\n",
            "3.500",
            "2",
        ),
    ],
)
def test_imported_iteration_times_have_a_page(store: Store, tmp_path: Path, table: str, loss: str, ranks: str) -> None:
    (tmp_path / "t.csv").write_text(table)
    app = brought_in(store, "iteration-times", tmp_path / "t.csv")
    shown = {metric.label: metric.value for metric in app.metric}
    assert (shown["Iterations"], shown["Loss"], shown["Iteration time"], shown["Ranks"]) == ("2", loss, "1.25 s", ranks)
    assert skew.NOT_KNOWN in text(app)
    assert not app.get("plotly_chart")
