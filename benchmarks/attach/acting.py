"""What acts on a training that is not ours: is the update the same, and is the gain what was predicted?

Parameters against those of one process (tests/support/jobs/acting_job.py, float64). Then lengths of data/lengths.toml in loops
without ranks and clocks (tests/support/jobs/divided_rules.py), of which each seed counts by itself; and real torchrun jobs of
two ranks under `unskew watch --mode auto` (tests/support/jobs/divided_job.py), also with a rank that is slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from support.jobs import acting_job, divided_job, divided_rules
from support.jobs.divided_rules import DividedLoop

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store

EXACT, WITHIN = 1e-12, 20.0
SEEDS, MADE_UP_SEEDS = 3, 20
LOOPS = tuple(
    DividedLoop(name, ranks=ranks, padded=padded)
    for name in ("code", "prolong")
    for ranks, padded in ((2, False), (2, True), (8, False))
)
JOBS = (("alike", "sleep"), ("code", "sleep"), ("prolong", "sleep"), ("prolong", "cores"))
WHAT = {"alike": f"a rank {divided_job.SLOWER:g} times slower", "code": "lengths of code", "prolong": "lengths of prolong"}
DIVIDED = [name for name, case in acting_job.CASES.items() if case.samples and name not in {"unknown", "resumed"}]


class Gain(NamedTuple):
    """Part of a step, in percent: as it was proposed, and as it was measured afterwards."""

    predicted: float
    measured: float


def figures(bench: Bench, seeds: int = SEEDS, made_up_seeds: int = MADE_UP_SEEDS) -> list[Figure]:
    apart = bench.kept("parameters after it", [DIVIDED], _apart, dict[str, float])[0]
    made_up = [_made_up(loop, made_up_seeds) for loop in bench.steps("loops that are acted on", LOOPS)]
    asked = [(name, device, seed) for name, device in JOBS for seed in range(seeds)]
    gains = bench.kept("trainings that are acted on", asked, lambda one: _gains(*one), list[Gain])
    found: dict[tuple[str, str], list[Gain]] = {job: [] for job in JOBS}
    for (name, device, _), scored in zip(asked, gains, strict=True):
        found[name, device] += scored
    return [
        figure("acting: parameters apart from one process's, float64", max(apart.values()), "", bar=EXACT, better="lower",
               note=", ".join(apart)),
        *made_up,
        *(_figure(name, device, of, seeds) for (name, device), of in found.items()),
    ]  # fmt: skip


def _figure(name: str, device: str, gains: list[Gain], seeds: int) -> Figure:
    what = f"acting: {WHAT[name]}, {device}: predicted gain over the measured one, off by"
    if not gains:
        return figure(what, None, "%", bar=WITHIN, better="lower", note="nothing was proposed, or entered")
    predicted, measured = fmean(one.predicted for one in gains), fmean(one.measured for one in gains)
    each = "; ".join(f"{one.predicted:.1f} and {one.measured:.1f}" for one in gains)
    note = f"predicted {predicted:.1f} %, measured {measured:.1f} %, means of {len(gains)} of {seeds} jobs ({each})"
    return figure(what, 100 * abs(predicted / measured - 1), "%", bar=WITHIN, better="lower", note=note)


def _made_up(loop: DividedLoop, seeds: int) -> Figure:
    """Of one distribution; the seed that is worst."""
    held = "padded" if loop.padded else "packed"
    what = f"acting: {WHAT[loop.name]}, {held}, {loop.ranks} ranks, made up: predicted gain over the measured one, off by"
    gains = [divided_rules.gain_of(divided_rules.trained(loop, seed)) for seed in range(seeds)]
    scored = [gain for gain in gains if gain is not None]
    if not scored:
        return figure(what, None, "%", bar=WITHIN, better="lower", note="nothing was proposed, or entered")
    off = sorted(100 * abs(gain.predicted / gain.measured - 1) for gain in scored)
    predicted, measured = fmean(one.predicted for one in scored), fmean(one.measured for one in scored)
    within = sum(gain.interval[0] <= gain.measured <= gain.interval[1] for gain in scored)
    note = (
        f"the most of {len(scored)} of {seeds} seeds, median {median(off):.1f} %; predicted {predicted:.1f} %, measured "
        f"{measured:.1f} % in the mean; {within} of them in the interval that was stated"
    )
    return figure(what, off[-1], "%", bar=WITHIN, better="lower", note=note)


def _apart(names: Sequence[str]) -> dict[str, float]:
    """Case -> the largest difference of a parameter of those ranks that stay."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="unskew-acting-") as place:
        folder = Path(place)
        subprocess.run([sys.executable, acting_job.__file__, str(folder / "exact"), str(folder), *names], check=True)
        for name in names:
            case = acting_job.CASES[name]
            ranks = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(case.ranks)]
            one = acting_job.reference(case, [of["given"] for of in ranks])
            stay = [of["parameters"] for rank, of in enumerate(ranks) if case.samples[rank]]
            found[name] = max(abs(a - b) for mine in stay for a, b in zip(mine, one, strict=True))
    return found


def _gains(name: str, device: str, seed: int) -> list[Gain]:
    """The first change's; none where none was scored."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = [*torchrun, divided_job.__file__, name, device, str(seed)]
    with tempfile.TemporaryDirectory(prefix="unskew-acting-") as folder:
        watch = [sys.executable, "-m", "unskew", "watch", "--store", folder, "--mode", "auto", "--", *job]
        subprocess.run(watch, check=True, capture_output=True)
        with open_store(Store(Path(folder))) as log:
            scored = "select gain_percent, 100 * effect_s / baseline_s from proposals join plans using (run, proposal)"
            rows = log.sql(f"{scored} where effect_s is not null order by from_iteration limit 1").rows()
    return [Gain(*row) for row in rows]
