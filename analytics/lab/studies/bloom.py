"""bloom: iteration times and memory of BLOOM-176B's measured configurations, predicted (BigScience chronicles, February 2022).

With m micro-batches per replica a stage works in ``m + pp - 1`` slots, in each on L / pp layers of one micro-batch. Seconds are
a sum of eight terms (`time_terms`): multiplications, softmax, attention off the fast path, tensor-parallel messages, kernels to
launch, the output head, gradients, and what the machine cost before it was mended. Their coefficients are non-negative and
fitted to the relative error; every row is predicted by coefficients that were fitted without it. Memory = ``a P / (tp pp) +
b P / (tp pp dp) + c mbs x checkpoints + d``, fitted on rows that ran; a row is predicted out of memory above 80 GB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import spearmanr

from unskew.analytics.core.constants import constant
from unskew.analytics.lab.studies.frame import Cell, Figures, Study

Array = NDArray[np.float64]
_SEQ = 2048
_VOCABULARY = 250_880
_LEAST_ROWS = 7
_MENDED = "2022-02-25"
"""From this day on PCI Express and NUMA were set up better: "1-5 %", "do not compare today's numbers to yesterday's"."""
_FAST_HEAD = 8
"""Half-precision tensor cores want the width of a head in multiples of this."""
_CONFIGURATION = ("size_b", "nhidden", "nheads", "dp", "tp", "pp", "mbs", "gbs", "zero_stage")


def measurements(frame: pl.DataFrame) -> pl.DataFrame:
    """Distinct measurements whose topology multiplies out, in the order of the source.

    What the table leaves blank the source states: 64 heads, ZeRO stage 1; width 14400 (the one section without widths is
    repeated with it). A measurement that was pasted twice counts once. Column `exchanged`: seconds and TFLOP/s are those of
    an earlier row of the same configuration reversed, a typing error.
    """
    frame = frame.filter(pl.col("topology_consistent")).with_columns(
        pl.col("nhidden").fill_null(14400), pl.col("nheads").fill_null(64), pl.col("zero_stage").fill_null(1)
    )
    frame = frame.unique([*_CONFIGURATION, "sec_per_it"], keep="first", maintain_order=True)
    earlier: set[tuple[object, ...]] = set()
    exchanged: list[bool] = []
    for row in frame.iter_rows(named=True):
        where, seconds, rate = tuple(row[name] for name in _CONFIGURATION), row["sec_per_it"], row["tflops_per_gpu"]
        exchanged.append((where, rate, seconds) in earlier)
        earlier.add((where, seconds, rate))
    return frame.with_columns(exchanged=pl.Series(exchanged))


def _columns(frame: pl.DataFrame) -> dict[str, Array]:
    names = ("size_b", "nhidden", "nheads", "dp", "tp", "pp", "mbs", "gbs")
    found = {name: frame[name].cast(pl.Float64).to_numpy() for name in names}
    found["parameters"] = found["size_b"] * 1e9
    found["layers"] = (found["parameters"] - _VOCABULARY * found["nhidden"]) / (12.0 * found["nhidden"] ** 2)
    return found


def time_terms(frame: pl.DataFrame) -> Array:
    """[row, 8]: what the seconds are made of, before fitted coefficients. Of one stage's device, per iteration:

    0. multiplications of its layers (forward, recomputed, backward) at the peak rate, s;
    1. the same, on days before the machine was mended;
    2. elements of its attention scores (softmax), 10^12;
    3. the scores' multiplications where a head's width is no multiple of 8, 10^15;
    4. bytes that its tensor-parallel group adds up, 10^12;
    5. layers that it launches, 100;
    6. multiplications of the output head, which the last stage does for every micro-batch, at the peak rate, s;
    7. parameters whose gradients it sends at the end, 10^9.
    """
    of = _columns(frame)
    m, width, peak = of["gbs"] / of["dp"] / of["mbs"], of["nhidden"], constant("peak_flops_a100")
    layers = (m + of["pp"] - 1) * of["layers"] / of["pp"]
    tokens = of["mbs"] * _SEQ
    worked = layers * 8 * tokens * 12 * width**2 / of["tp"] / peak
    scores = layers * tokens * _SEQ / of["tp"]
    before = (frame["date"] < _MENDED).cast(pl.Float64).to_numpy()
    slow_path = width % (of["nheads"] * _FAST_HEAD) != 0
    sent = layers * tokens * width * 2.0 * (of["tp"] - 1) / of["tp"]
    head = m * tokens * 6 * width * _VOCABULARY / of["tp"] / peak
    gradients = of["parameters"] / (of["tp"] * of["pp"]) * (of["dp"] - 1) / of["dp"]
    terms = [
        worked, worked * before, scores * of["nheads"] / 1e12, scores * width * slow_path / 1e15, sent / 1e12, layers / 100,
        head, gradients / 1e9,
    ]  # fmt: skip
    return np.stack(terms, axis=1)


def memory_terms(frame: pl.DataFrame) -> Array:
    """[row, 4]: what the memory per GPU is made of (GB): weights and gradients, sharded optimiser, checkpoints, the rest."""
    of = _columns(frame)
    held = of["parameters"] / (of["tp"] * of["pp"]) / 1e9
    checkpoints = of["mbs"] * _SEQ * of["nhidden"] * 2.0 * of["layers"] / 1e9
    return np.stack([held, held / of["dp"], checkpoints, np.ones(len(held))], axis=1)


def left_out(terms: Array, seconds: Array, groups: Sequence[object]) -> Array:
    """[row]: predicted seconds, each row by coefficients that were fitted without any row of its group."""
    predicted = np.zeros(len(seconds))
    for group in dict.fromkeys(groups):
        mine = np.array([other == group for other in groups])
        coefficients, _ = nnls(terms[~mine] / seconds[~mine, None], np.ones(int((~mine).sum())))
        predicted[mine] = terms[mine] @ coefficients
    return predicted


def repeat_noise(rows: pl.DataFrame) -> float:
    """Standard deviation of the log of a measurement: of one configuration, measured again on the same state of the machine."""
    logs = rows.select(pl.col("sec_per_it").log(), *_CONFIGURATION, mended=pl.col("date") >= _MENDED)
    off = logs.with_columns(
        off=pl.col("sec_per_it") - pl.col("sec_per_it").mean().over(*_CONFIGURATION, "mended"),
        n=pl.len().over(*_CONFIGURATION, "mended"),
    ).filter(pl.col("n") > 1)
    freedom = off.height - off.select(*_CONFIGURATION, "mended").unique().height
    return float(np.sqrt(np.square(off["off"].to_numpy()).sum() / freedom)) if freedom else 0.0


def most_correlation(seconds: Array, noise: float, draws: int = 2000) -> float:
    """Mean rank correlation of the seconds with themselves measured again: more no prediction can be expected to have."""
    random = np.random.default_rng(0)
    again = seconds * np.exp(random.normal(0.0, noise, (draws, len(seconds))))
    return float(np.mean([spearmanr(seconds, one)[0] for one in again]))


def _measure(_cell: Cell, typed: pl.DataFrame) -> Figures:
    table = measurements(typed)
    timed = table.filter(pl.col("sec_per_it").is_not_null() & ~pl.col("oom"))
    rows = timed.filter(~pl.col("exchanged"))
    seconds, predicted = rows["sec_per_it"].to_numpy(), _each_by_others(rows)
    noise = repeat_noise(rows)
    found: Figures = {
        "configurations": float(rows.height),
        "median error, all (%)": 100.0 * _median_error(predicted, seconds),
        "rank correlation, all": float(spearmanr(predicted, seconds)[0]),
        "one configuration measured again, standard deviation (%)": 100.0 * noise,
    }
    stricter = left_out(time_terms(rows), seconds, rows.select(_CONFIGURATION).rows())
    as_typed = _each_by_others(timed)
    sizes = rows["size_b"].to_numpy()
    for size in np.unique(sizes):
        mine, typed = sizes == size, timed["size_b"].to_numpy() == size
        if mine.sum() < _LEAST_ROWS:
            continue
        name, measured = f"{size:g}B, {int(mine.sum())} rows", seconds[mine]
        found[f"{name}: median error (%)"] = 100.0 * _median_error(predicted[mine], measured)
        found[f"{name}: rank correlation"] = float(spearmanr(predicted[mine], measured)[0])
        found[f"{name}: rank correlation, without any row of the same configuration"] = float(
            spearmanr(stricter[mine], measured)[0]
        )
        if typed.sum() > mine.sum():
            every = timed["sec_per_it"].to_numpy()[typed]
            found[f"{name}: rank correlation with the exchanged row as typed"] = float(spearmanr(as_typed[typed], every)[0])
        found[f"{name}: rank correlation of measuring again"] = most_correlation(measured, noise)
    return found | _memory(table)


def _each_by_others(rows: pl.DataFrame) -> Array:
    return left_out(time_terms(rows), rows["sec_per_it"].to_numpy(), range(rows.height))


def _median_error(predicted: Array, measured: Array) -> float:
    return float(np.median(np.abs(predicted / measured - 1.0)))


def _memory(table: pl.DataFrame) -> Figures:
    ran = table.filter(pl.col("mem_gb").is_not_null() & ~pl.col("oom"))
    measured = ran["mem_gb"].to_numpy()
    coefficients, _ = nnls(memory_terms(ran), measured)
    predicted = memory_terms(table) @ coefficients > constant("hbm_gib_a100")
    oom = table["oom"].to_numpy()
    return {
        "median error of memory (GB)": float(np.median(np.abs(memory_terms(ran) @ coefficients - measured))),
        "out of memory, predicted so": float((predicted & oom).sum()),
        "out of memory, predicted to fit": float((~predicted & oom).sum()),
        "ran, predicted to fit": float((~predicted & ~oom).sum()),
        "ran, predicted out of memory": float((predicted & ~oom).sum()),
    }


def _why(figure: str, _paper: float | None, _ours: float | None) -> str:
    if figure.endswith("as typed"):
        return "one row has the seconds of an earlier one in the column of its TFLOP/s, and the other way round"
    if figure.endswith("measuring again"):
        return "two measurements of the same rows, with the noise of the configurations that were measured more than once"
    return ""


BLOOM = Study(
    name="bloom",
    about="measured configurations of BLOOM-176B and its neighbours, each predicted without itself",
    cells=lambda _seeds: [Cell(study="bloom", name="all rows", seed=0, file="throughput-configs.csv")],
    measure=_measure,
    why=_why,
    needs="bigscience-bloom",
)
