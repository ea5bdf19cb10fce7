"""diagnose, whatif and retrain as people and scripts use them: on an imported trace, and refusing.

On a run of ours: test_runs.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.formats.registry import bring_in
from unskew.collector.paths import Store

pytestmark = pytest.mark.limit(180)


def trace(path: Path, *, slow_stage: float, steps: int = 12, replicas: int = 4, micro_batches: int = 4) -> Path:
    """An NDTimeline trace of a two-stage 1F1B pipeline whose last stage takes `slow_stage` times as long as the first."""
    random = np.random.default_rng(5)
    rows = []

    def row(where: tuple[int, int, int], kind: str, start: float, took: float, seq: int) -> None:
        replica, stage, step = where
        work = kind.endswith("compute")
        rows.append(
            (*where[:2], 2 * replica + stage, step, kind, start, took, seq, 0, seq if work else -1, stage if work else -1)
        )

    for step in range(steps):
        ends = []
        for replica in range(replicas):
            noise = iter(np.exp(random.normal(0, 0.01, 8 * micro_batches)))
            free, sent, back = [0.0, 0.0], [], []
            orders = [["F", "F"] + ["B", "F"] * (micro_batches - 2) + ["B", "B"], ["F", "B"] * micro_batches]
            seqs = [{"F": 0, "B": 0}, {"F": 0, "B": 0}]
            while orders[0] or orders[1]:
                for stage in (1, 0):
                    if not orders[stage]:
                        continue
                    kind = orders[stage][0]
                    seq = seqs[stage][kind]
                    given = sent if (stage, kind) == (1, "F") else back if (stage, kind) == (0, "B") else None
                    if given is not None and seq >= len(given):
                        continue
                    start = max(free[stage], given[seq] if given is not None else 0.0)
                    took = (0.1 if kind == "F" else 0.2) * (slow_stage if stage else 1.0) * float(next(noise))
                    word = "forward" if kind == "F" else "backward"
                    if given is not None:
                        row((replica, stage, step), f"{word}-recv", free[stage], start - free[stage] + 0.001, seq)
                    row((replica, stage, step), f"{word}-compute", start, took, seq)
                    free[stage] = start + took
                    if (stage, kind) in {(0, "F"), (1, "B")}:
                        (sent if stage == 0 else back).append(free[stage])
                        row((replica, stage, step), f"{word}-send", free[stage], 0.001, seq)
                    seqs[stage][kind] += 1
                    orders[stage].pop(0)
            ends.append(free)
        last = max(max(free) for free in ends)
        for replica, free in enumerate(ends):
            for stage in range(2):
                row((replica, stage, step), "grads-reduce-scatter", free[stage], last - free[stage] + 0.02, 0)
                row((replica, stage, step), "optimizer-clip-main-grad", last + 0.02, 0.001, 0)
                row((replica, stage, step), "optimizer", last + 0.021, 0.01, 0)
    names = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")
    pl.DataFrame(rows, schema=list(names), orient="row").write_parquet(path)
    return path


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


@pytest.mark.slow
def test_an_imported_trace_is_diagnosed_and_replayed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    bring_in(store, "straggler-analysis", trace(tmp_path / "t.parquet", slow_stage=1.5), "uneven")
    code, output = call("diagnose", "uneven", "--store", store.root, "--json", tmp_path / "d.json")
    assert code == 0, output
    (run,) = json.loads((tmp_path / "d.json").read_text())["runs"]
    assert set(run) >= {"run_id", "verdicts", "time_lost_s", "abstained"}
    (verdict,) = run["verdicts"]
    assert verdict["cause"] == "stage_imbalance"
    assert verdict["culprits"] == [{"kind": "stage", "stage": 1}]
    assert set(verdict) >= {
        "cause", "culprits", "victims", "speed", "since_iteration", "until_iteration", "at_iteration", "confidence", "evidence",
    }  # fmt: skip
    assert run["time_lost_s"]["stage_imbalance"] > 0.5 * sum(run["time_lost_s"].values())
    code, output = call("whatif", "uneven", "--equal-stages", "--store", store.root, "--json", tmp_path / "w.json")
    assert code == 0, output
    found = json.loads((tmp_path / "w.json").read_text())
    assert set(found) >= {"slowdown", "worker_slowdown", "m_w", "m_s", "simulator_error"}
    assert found["slowdown"] > 1.05
    assert found["m_s"] > 0.8
    assert found["simulator_error"] < 0.02
    assert found["asked"][0]["saves_percent"] > 5
    # Other detectors beside it, which know devices only; and what was known at a moment, where nothing was decided.
    code, output = call("backtest", "uneven", "--detector", "nvrx", "--store", store.root, "--json", tmp_path / "b.json")
    assert code == 0, output
    pairs = json.loads((tmp_path / "b.json").read_text())["pairs"]
    assert {(pair["culprits"], pair["change"]) for pair in pairs} >= {("stage 1", "fewer"), ("rank 1", "more")}
    code, output = call("backtest", "uneven", "--detector", "resihp", "--store", store.root)
    assert (code, "without the lengths" in output) == (2, True)
    code, output = call("replay", "uneven", "--until", 9, "--store", store.root)
    assert (code, "stage 1 takes" in output, "nothing was decided" in output) == (0, True, True)
    assert call("replay", "uneven", "--until", 99, "--store", store.root)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("diagnose", "nobody"), "there is no run nobody"),
        (("whatif", "times"), "run times has no forward and backward times per micro-batch"),
        (("retrain", "times"), "run times has no chunk times with micro-batch lengths"),
        (("retrain", "times", "--share", "2"), "--share 2: allowed are 0.2 to 0.9"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    table = tmp_path / "times.csv"
    table.write_text("step,seconds\n" + "".join(f"{i},{1 + i % 3 / 100}\n" for i in range(40)))
    store = Store(tmp_path / "store")
    bring_in(store, "iteration-times", table, "times")
    code, output = call(*arguments, "--store", store.root)
    assert code == 2
    assert sentence in output
