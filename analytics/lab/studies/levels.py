"""What each level of our own Scheduler brings, and each part of its search: switched off one by one, and all levels."""

from __future__ import annotations

from typing import get_args

from unskew.analytics.cluster.job import JOBS
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.studies.frame import Cell, Figures, Study
from unskew.analytics.lab.studies.resihp.sessions import kills
from unskew.analytics.planners.problem import Level
from unskew.analytics.policies.unskew import UnskewPolicy
from unskew.analytics.scheduler.state import Part, SchedulerOptions

_JOBS = ("llama2-7b", "llama2-13b", "llama-30b")
_EVERY_S, _HOURS = 3600.0, 6.0
_LEVELS: dict[str, tuple[Level, ...]] = {
    "all levels": ("tp", "pp", "dp"),
    "without TP": ("pp", "dp"),
    "without PP": ("tp", "dp"),
    "without DP": ("tp", "pp"),
    "TP alone": ("tp",),
    "PP alone": ("pp",),
    "DP alone": ("dp",),
    "rerouting alone": (),
}
_OPTIONS = {name: SchedulerOptions(levels=levels) for name, levels in _LEVELS.items()}
_OPTIONS |= {f"without {part}": SchedulerOptions(without=(part,)) for part in get_args(Part)}


def _levels(cell: Cell) -> Figures:
    """Effective training time of the session, 1F1B."""
    job = JOBS[cell.name]
    cluster_events = kills(job, _EVERY_S, _HOURS, cell.seed, slow=0.5)
    found: Figures = {}
    for name, options in _OPTIONS.items():
        outcome = simulate(job, UnskewPolicy(options), cluster_events, SimulationOptions(hours=_HOURS, seed=cell.seed))
        found[f"{cell.name}: {name}"] = 100.0 * outcome.effective
        found[f"{cell.name}: capacity"] = 100.0 * outcome.capacity
    whole = found[f"{cell.name}: all levels"]
    assert whole is not None
    for name in _OPTIONS:
        if name.startswith("without"):  # session by session, so that what the sessions differ by is not in the interval
            found[f"{cell.name}: lost {name}"] = whole - (found[f"{cell.name}: {name}"] or 0.0)
    return found


LEVELS = Study(
    name="levels",
    about="what each level of the Scheduler and part of its search brings: hourly a GPU dies or, in turn, runs at half speed",
    unit="% of the time",
    cells=lambda seeds: [Cell(study="levels", name=name, seed=seed) for name in _JOBS for seed in range(seeds)],
    measure=_levels,
    notes=("rerouting after a death is no level: without it a job stands still",),
)
