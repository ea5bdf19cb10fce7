"""The right device first, among 256 to 8,192: by chunks, by collectives with the waiting inside, and links."""

from __future__ import annotations

import numpy as np
from support.traces.watched_jobs import MILDEST, PAST, RECENT, SLOWEST, JobShape, job, links

from unskew.analytics.lab.culprits import own_from_waits, rank_devices, rank_links
from unskew.analytics.lab.studies.noise import Noise, load_noise
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

LAYOUTS = {256: JobShape(8, 4, 8), 2048: JobShape(8, 8, 32), 8192: JobShape(8, 16, 64)}


def figures(_bench: Bench, jobs: int = 400) -> list[Figure]:
    """One and two faults at once; seeds apart from those used for tuning."""
    noise, found = load_noise(), []
    for by, bars in (("chunks", {256: 99.5, 8192: 99.5}), ("collectives", {256: 98.0, 2048: 97.0, 8192: 92.0})):
        for devices, bar in bars.items():
            for n_faults in (1, 2):
                n_jobs = jobs if devices == 256 else max(jobs // 4, 10)
                right = sum(_found(LAYOUTS[devices], n_faults, by, noise, noise.seeds.figures + seed) for seed in range(n_jobs))
                found.append(
                    figure(
                        f"culprits: right device{'s' if n_faults > 1 else ''} first by {by}, {devices:,} devices, "
                        f"{n_faults} slow at once", 100 * right / n_jobs, "%", bar=bar, better="higher",
                        note=f"{n_jobs} jobs; slowdown {MILDEST} to {SLOWEST}, {RECENT} slowed iterations after {PAST} healthy",
                    )
                )  # fmt: skip
    right = 0
    for seed in range(jobs):
        times, slow = links(LAYOUTS[2048], noise, np.random.default_rng(noise.seeds.figures + seed))
        right += rank_links(times, RECENT).first(1) == {slow}
    note = f"{jobs} jobs of {LAYOUTS[2048].dp * (LAYOUTS[2048].pp - 1)} links; 1.2 to 4 times as long"
    found.append(figure("culprits: right link first", 100 * right / jobs, "%", bar=97, better="higher", note=note))
    return found


def _found(layout: JobShape, n_faults: int, by: str, noise: Noise, seed: int) -> bool:
    watched = job(layout, n_faults, noise, np.random.default_rng(seed))
    own = watched.own_us if by == "chunks" else own_from_waits(watched.step_us, watched.waits_us)
    return rank_devices(own, RECENT).first(n_faults) == watched.culprits
