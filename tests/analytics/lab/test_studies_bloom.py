"""The BLOOM study: every row predicted without itself, mistyped and repeated rows found; a made table and the real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from support.datasets import dataset

from unskew.analytics.lab.studies.bloom import left_out, measurements, repeat_noise, time_terms
from unskew.analytics.lab.studies.registry import STUDIES
from unskew.edge.run_study import run_study

SHAPES = [(4, 8, 12), (8, 8, 6), (8, 4, 12), (16, 4, 6), (8, 2, 24), (24, 8, 2)]
SPEND = np.array([1.1, 0.1, 30.0, 1500.0, 180.0, 0.8, 1.9, 3.3])


def made() -> tuple[pl.DataFrame, pl.DataFrame]:
    """A table that the eight terms explain wholly; as typed: blanks, a row twice, one with exchanged columns."""
    rows = [
        {"dp": dp, "tp": tp, "pp": pp, "mbs": mbs, "nheads": heads, "date": date}
        for dp, tp, pp in SHAPES for mbs in (1, 2, 4) for heads, date in ((64, "2022-02-21"), (80, "2022-02-25"))
    ]  # fmt: skip
    frame = pl.DataFrame(rows).with_columns(
        size_b=pl.lit(181.0), nhidden=14400, gbs=2048, zero_stage=1, oom=False, mem_gb=pl.lit(None, pl.Float64),
        topology_consistent=True,
    )  # fmt: skip
    seconds = time_terms(frame) @ SPEND
    frame = frame.with_columns(sec_per_it=pl.Series(seconds), tflops_per_gpu=pl.Series(16121.0 / seconds))
    first = frame.head(1)
    swapped = first.with_columns(sec_per_it=pl.col("tflops_per_gpu"), tflops_per_gpu=pl.col("sec_per_it"))
    blank = first.with_columns(nhidden=pl.lit(None, pl.Int32), nheads=pl.lit(None, pl.Int64), zero_stage=pl.lit(None, pl.Int32))
    return frame, pl.concat([frame, blank, swapped])


def test_blanks_are_filled_a_repeated_row_counts_once_and_an_exchanged_one_is_marked() -> None:
    frame, typed = made()
    read = measurements(typed)
    assert read.height == frame.height + 1
    assert read["exchanged"].to_list() == [False] * frame.height + [True]
    assert read["nheads"].null_count() == read["nhidden"].null_count() == 0


def test_a_row_is_predicted_by_the_others_alone() -> None:
    rows = measurements(made()[1]).filter(~pl.col("exchanged"))
    seconds, terms = rows["sec_per_it"].to_numpy().copy(), time_terms(rows)
    assert left_out(terms, seconds, range(len(seconds))) == pytest.approx(seconds, rel=1e-6)
    honest = left_out(terms, seconds, range(len(seconds)))[5]
    seconds[5] *= 2.0
    assert left_out(terms, seconds, range(len(seconds)))[5] == pytest.approx(honest)


def test_the_noise_of_a_measurement_is_that_of_configurations_measured_again() -> None:
    rows = measurements(made()[1]).filter(~pl.col("exchanged"))
    assert repeat_noise(rows) == 0.0
    again = pl.concat([rows, rows.head(30).with_columns(pl.col("sec_per_it") * np.exp(0.02))])
    assert repeat_noise(again) == pytest.approx(0.02 / 2**0.5)


@pytest.mark.slow
def test_the_published_rows_are_ranked_and_predicted(tmp_path: Path) -> None:
    data = dataset("bigscience-bloom", "throughput-configs.csv").parents[1]
    found = {row.figure: row.ours for row in run_study(STUDIES["bloom"], seeds=1, out=tmp_path, data=data).rows}
    assert (found["181B, 37 rows: rank correlation"] or 0.0) >= 0.9
    assert (found["181B, 37 rows: rank correlation, without any row of the same configuration"] or 0.0) >= 0.9
    assert (found["181B, 37 rows: median error (%)"] or 99.0) <= 3.0
    assert (found["median error, all (%)"] or 99.0) <= 3.0
    assert found["out of memory, predicted so"] == 3
    assert found["out of memory, predicted to fit"] == found["ran, predicted out of memory"] == 0
