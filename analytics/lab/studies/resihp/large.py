"""ResiHP's large run: 256 GPUs, 10,000 iterations, deaths and slow phases with re-joins."""

from __future__ import annotations

import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.timing import fault_free_s
from unskew.analytics.lab.studies.frame import Cell, Figures, Study
from unskew.analytics.lab.studies.resihp.mixed import MIXED
from unskew.analytics.lab.studies.resihp.sessions import play, played


def _large_cells(seeds: int) -> list[Cell]:
    return [Cell(study="resihp-large", name="llama2-70b, 256 GPUs", seed=seed) for seed in range(seeds)]


def _large(cell: Cell) -> Figures:
    """10,000 iterations of 256 GPUs: deaths and slow phases with re-joins, some three dozen of each."""
    job = played("llama2-70b")
    hours = 10000 * fault_free_s(job) / 3600.0
    random = np.random.default_rng(cell.seed)
    cluster_events = []
    for number, at_s in enumerate(np.sort(random.uniform(0, hours * 3600, 72)).tolist()):
        device = (int(random.integers(job.devices)),)
        back_s = at_s + float(random.exponential(3600.0 * hours / 24))
        if number % 2:
            cluster_events += [ClusterEvent(kind="slowed", at_s=at_s, devices=device, speed=0.5)]
            cluster_events += [ClusterEvent(kind="recovered", at_s=back_s, devices=device)]
        else:
            cluster_events += [ClusterEvent(kind="failed", at_s=at_s, devices=device)]
            cluster_events += [ClusterEvent(kind="joined", at_s=back_s, devices=device)]
    outcomes = {name: play(job, make, cluster_events, hours, cell.seed) for name, make in MIXED.items()}
    resihp = outcomes["resihp"].effective
    return {
        "ResiHP over strengthened ReCycle": resihp / outcomes["strengthened-recycle"].effective,
        "ResiHP over strengthened Oobleck": resihp / outcomes["strengthened-oobleck"].effective,
        "Unskew over ResiHP": outcomes["unskew"].effective / resihp,
        **{f"effective: {name}": outcome.effective for name, outcome in outcomes.items()},
        "surviving capacity": outcomes["unskew"].capacity,
    }


LARGE = Study(
    name="resihp-large",
    about="LLaMA2-70B on 256 GPUs, 10,000 iterations with failures and re-joins (ResiHP section 8.4)",
    cells=_large_cells,
    measure=_large,
    paper={"ResiHP over strengthened ReCycle": 1.39, "ResiHP over strengthened Oobleck": 1.11},
    why=lambda figure, _p, _o: (
        "the paper gives no rates: ours are 36 deaths and 36 slow phases, each 1/24 of the run long"
        if figure.startswith("ResiHP")
        else ""
    ),
)
