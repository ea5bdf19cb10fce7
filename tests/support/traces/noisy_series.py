"""Iteration times that nobody has seen: real residuals of public series, resampled in blocks, with slow episodes put in.

The residuals of a series are its logs less their median over the neighbourhood; blocks keep what neighbours have in common.
Real slow phases shorter than the neighbourhood stay in them, so that an alarm where nothing was put in may be a real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.ndimage import median_filter
from support import datasets

Floats = NDArray[np.float64]

NEIGHBOURHOOD = 101
BLOCK = 25
STARTED = 20  # the first iterations of a job pay for start-up


class Episode(msgspec.Struct, frozen=True):
    """Iterations `at` to `at + length` take `factor` times as long; with `ramp` that is reached evenly after half of them."""

    at: int
    length: int
    factor: float
    ramp: bool = False

    @property
    def until(self) -> int:
        return self.at + self.length

    @property
    def logs(self) -> Floats:
        """What the log of the time is longer by, per iteration."""
        risen = np.minimum(np.arange(1, self.length + 1) / max(self.length // 2, 1), 1.0) if self.ramp else np.ones(self.length)
        return np.asarray(np.log(1 + (self.factor - 1) * risen))


class Recorded(msgspec.Struct, frozen=True):
    """One recording: `times` by `steps` of the job. Those of the same `work` ran the same job, on other machines or at another
    time."""

    name: str
    work: str
    steps: NDArray[np.int64]
    times: Floats


def mlperf() -> Iterator[Recorded]:
    """Seconds per training step of audited runs."""
    path = datasets.find("mlperf-steptimes", "steps.parquet")
    if path is not None:
        steps = pl.read_parquet(path).filter(pl.col("kind") == "train").drop_nulls("step_time_s")
        for (run,), rows in steps.group_by(["run_id"], maintain_order=True):
            times = rows["step_time_s"].to_numpy().astype(np.float64)
            yield Recorded(str(run), str(run).rpartition("/")[0], np.arange(len(times)), times)


def megatron() -> Iterator[Recorded]:
    """Seconds per iteration of Megatron-LM's own tests: `test case @ machine`, a shorter one of the same job ends in _sm."""
    path = datasets.find("megatron-iteration-times", "iteration-times.parquet")
    if path is not None:
        for (series,), rows in pl.read_parquet(path).sort("step").group_by(["series_id"], maintain_order=True):
            work = str(series).partition("@")[0].removesuffix("_sm")
            yield Recorded(str(series), work, rows["step"].to_numpy(), rows["iteration_time_s"].to_numpy())


def azure() -> Iterator[Recorded]:
    """Time per unit of memory traffic of cloud machines, in pieces: months of measurements are no one job."""
    path = datasets.find("azure-vm-noise", "memory-westus2.parquet")
    if path is not None:
        for (vm, test), rows in pl.read_parquet(path).group_by(["vm", "test"], maintain_order=True):
            times = 1.0 / rows.sort("starttime")["value"].to_numpy().astype(np.float64)
            for first in range(0, len(times) - 500, 500):
                yield Recorded(f"{vm} {test} {first}", str(test), np.arange(500), times[first : first + 500])


def alibaba() -> Iterator[Recorded]:
    """Step times of workers that wait for nobody, a series each, without those that are labelled slow."""
    path, labels = (datasets.find("alibaba-minibatch", name) for name in ("minibatch-jobs-1-3.parquet", "labels.csv"))
    if path is not None and labels is not None:
        slow = {(job, worker) for job, worker in pl.read_csv(labels).select("job", "worker").iter_rows()}
        steps = pl.read_parquet(path).filter(pl.col("batch_time_norm") > 0).sort("time")
        for (job, worker), rows in steps.group_by(["job", "worker"], maintain_order=True):
            if (job, worker) not in slow:
                times = rows["batch_time_norm"].to_numpy().astype(np.float64)
                yield Recorded(f"job {job}, worker {worker}", f"job {job}", rows["time"].to_numpy().astype(np.int64), times)


SOURCES = {"MLPerf": mlperf, "Megatron": megatron, "Azure": azure}


def residuals(series: Iterable[Recorded], least: int = 120) -> list[Floats]:
    """Of each series of `least` iterations and more."""
    found = []
    for one in series:
        if len(one.times) >= least:
            logs = np.log(one.times[STARTED:])
            found.append(np.asarray(logs - median_filter(logs, NEIGHBOURHOOD, mode="nearest")))
    return found


def spread(residual: Floats) -> float:
    """Standard deviation, spikes left out."""
    return float(1.4826 * np.median(np.abs(residual - np.median(residual))))


def unseen(residual: Floats, n: int, episodes: tuple[Episode, ...], random: np.random.Generator) -> Floats:
    """`n` iteration times in us: blocks of one series' residuals, a slow first iteration, and the episodes."""
    starts = random.integers(0, len(residual) - BLOCK, n // BLOCK + 1)
    logs = np.concatenate([residual[start : start + BLOCK] for start in starts])[:n]
    logs[0] += random.uniform(0.0, 3.0)
    for episode in episodes:
        logs[episode.at : episode.until] += episode.logs[: n - episode.at]
    return np.asarray(random.uniform(1e5, 2e7) * np.exp(logs))
