"""bloom: iteration times and memory of BLOOM-176B's measured configurations, predicted (BigScience chronicles, February 2022).

Seconds = ``c1 W s + c2 W s / mbs + c3 comm s + c4 m L / pp`` with W = 8 P tokens / (GPUs x peak) (recomputation included),
``s = (m + pp - 1) / m`` the pipeline's bubble, m micro-batches per replica, comm the tensor-parallel bytes and the last term a
cost per micro-batch and layer; times a factor per model size (tile effects of its width). Every row is predicted by
coefficients and factor that were fitted without it. Memory = ``a P / (tp pp) + b P / (tp pp dp) + c mbs x checkpoints + d``,
fitted on rows that ran; a row is predicted out of memory above 80 GB.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import spearmanr

from unskew.analytics.constants import constant
from unskew.analytics.studies.frame import Cell, Figures, Study

Array = NDArray[np.float64]
_SEQ = 2048
_LEAST_ROWS = 8
_GIGABYTES = 80.0


def _table(folder: str) -> pl.DataFrame:
    """Distinct configurations whose topology multiplies out; a width that is not given is BLOOM's own."""
    frame = pl.read_csv(Path(folder) / "throughput-configs.csv").filter(pl.col("topology_consistent"))
    columns = ["size_b", "nhidden", "nheads", "dp", "tp", "pp", "mbs", "gbs", "zero_stage", "sec_per_it", "mem_gb", "oom"]
    return frame.select(pl.col(columns)).unique(maintain_order=True).with_columns(pl.col("nhidden").fill_null(14336))


def _columns(frame: pl.DataFrame) -> dict[str, Array]:
    names = ("size_b", "nhidden", "dp", "tp", "pp", "mbs", "gbs")
    found = {name: frame[name].cast(pl.Float64).to_numpy() for name in names}
    found["parameters"] = found["size_b"] * 1e9
    found["layers"] = found["parameters"] / (12.0 * found["nhidden"] ** 2)
    return found


def time_terms(frame: pl.DataFrame) -> Array:
    """[row, 4]: what the seconds are made of, before fitted coefficients."""
    of = _columns(frame)
    m = of["gbs"] / of["dp"] / of["mbs"]
    bubble = (m + of["pp"] - 1) / m
    work = 8 * of["parameters"] * of["gbs"] * _SEQ / (of["dp"] * of["tp"] * of["pp"]) / constant("peak_flops_a100")
    layers = of["layers"] / of["pp"]
    sent = of["gbs"] / of["dp"] * _SEQ * of["nhidden"] * 2.0 * layers * (of["tp"] - 1) / of["tp"]
    return np.stack([work * bubble, work * bubble / of["mbs"], sent / 1e12 * bubble, m * layers / 100], axis=1)


def memory_terms(frame: pl.DataFrame) -> Array:
    """[row, 4]: what the memory per GPU is made of (GB): weights and gradients, sharded optimiser, checkpoints, the rest."""
    of = _columns(frame)
    held = of["parameters"] / (of["tp"] * of["pp"]) / 1e9
    checkpoints = of["mbs"] * _SEQ * of["nhidden"] * 2.0 * of["layers"] / 1e9
    return np.stack([held, held / of["dp"], checkpoints, np.ones(len(held))], axis=1)


def _left_out(terms: Array, seconds: Array, sizes: Array) -> tuple[Array, Array]:
    """(predicted with the size's factor, without it), each row by the others alone."""
    scaled, plain = np.zeros(len(seconds)), np.zeros(len(seconds))
    for row in range(len(seconds)):
        others = np.arange(len(seconds)) != row
        coefficients, _ = nnls(terms[others] / seconds[others, None], np.ones(int(others.sum())))
        base = terms @ coefficients
        same = others & (sizes == sizes[row])
        plain[row] = base[row]
        scaled[row] = base[row] * (float(np.median(seconds[same] / base[same])) if same.any() else 1.0)
    return scaled, plain


_TOPOLOGY = ("nhidden", "dp", "tp", "pp", "mbs", "gbs")


def most_correlation(rows: pl.DataFrame) -> float:
    """The rank correlation of a model that knows the mean of every topology's own rows: what no cost model can pass by much."""
    known = rows.select(pl.col("sec_per_it").mean().over(_TOPOLOGY))["sec_per_it"]
    return float(spearmanr(known, rows["sec_per_it"])[0])


def _measure(cell: Cell) -> Figures:
    frame = _table(cell.params["data"])
    timed = frame.filter(pl.col("sec_per_it").is_not_null() & ~pl.col("oom"))
    seconds, sizes = timed["sec_per_it"].to_numpy(), timed["size_b"].to_numpy()
    scaled, plain = _left_out(time_terms(timed), seconds, sizes)
    errors = np.abs(scaled / seconds - 1.0)
    found: Figures = {
        "configurations": float(len(seconds)),
        "median error, all (%)": 100.0 * float(np.median(errors)),
        "rank correlation, all": float(spearmanr(scaled, seconds)[0]),
    }
    for size in np.unique(sizes):
        rows = sizes == size
        if rows.sum() >= _LEAST_ROWS:
            found[f"{size:g}B, {int(rows.sum())} rows: median error (%)"] = 100.0 * float(np.median(errors[rows]))
            found[f"{size:g}B, {int(rows.sum())} rows: rank correlation"] = float(spearmanr(plain[rows], seconds[rows])[0])
            alike = timed.with_columns(plain=pl.Series(plain)).filter(pl.Series(rows))
            found[f"{size:g}B: rank correlation, if each topology's own mean were known"] = most_correlation(alike)
            median = alike.group_by(_TOPOLOGY).agg(pl.col("sec_per_it", "plain").median())
            if median.height >= _LEAST_ROWS:
                correlation = float(spearmanr(median["plain"], median["sec_per_it"])[0])
                found[f"{size:g}B: rank correlation of its {median.height} topologies"] = correlation
    ran = frame.filter(pl.col("mem_gb").is_not_null() & ~pl.col("oom"))
    measured = ran["mem_gb"].to_numpy()
    coefficients, _ = nnls(memory_terms(ran), measured)
    predicted = memory_terms(frame) @ coefficients > _GIGABYTES
    oom = frame["oom"].to_numpy()
    found["median error of memory (GB)"] = float(np.median(np.abs(memory_terms(ran) @ coefficients - measured)))
    found |= {
        "out of memory, predicted so": float((predicted & oom).sum()),
        "out of memory, predicted to fit": float((~predicted & oom).sum()),
        "ran, predicted to fit": float((~predicted & ~oom).sum()),
        "ran, predicted out of memory": float((predicted & ~oom).sum()),
    }
    return found


def _why(figure: str, _paper: float | None, _ours: float | None) -> str:
    if figure.endswith("rows: rank correlation"):
        return "rows of one topology differ by up to 20 % with the number of heads and the day, which no term here knows"
    if "own mean" in figure:
        return "the most that topology tells; terms for all-reduce, messages and the output head do not raise ours"
    return ""


BLOOM = Study(
    name="bloom",
    about="measured configurations of BLOOM-176B and its neighbours, each predicted without itself",
    cells=lambda _seeds: [Cell(study="bloom", name="all rows", seed=0)],
    measure=_measure,
    why=_why,
    needs="bigscience-bloom",
)
