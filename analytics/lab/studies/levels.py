"""What each level of our own Scheduler brings: TP, PP and DP switched off one by one, and all of them."""

from __future__ import annotations

from unskew.analytics.cluster.job import JOBS
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.studies.frame import Cell, Figures, Study
from unskew.analytics.lab.studies.resihp.sessions import kills
from unskew.analytics.planners.problem import Level
from unskew.analytics.policies.unskew import UnskewPolicy
from unskew.analytics.scheduler.state import SchedulerOptions

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


def _levels(cell: Cell) -> Figures:
    """Effective training time of the session, 1F1B."""
    job = JOBS[cell.name]
    cluster_events = kills(job, _EVERY_S, _HOURS, cell.seed, slow=0.5)
    found: Figures = {}
    for name, levels in _LEVELS.items():
        policy = UnskewPolicy(SchedulerOptions(levels=levels))
        outcome = simulate(job, policy, cluster_events, SimulationOptions(hours=_HOURS, seed=cell.seed))
        found[f"{cell.name}: {name}"] = 100.0 * outcome.effective
        found[f"{cell.name}: capacity"] = 100.0 * outcome.capacity
    return found


LEVELS = Study(
    name="levels",
    about="what each level of the Scheduler brings: every hour a GPU dies or, in turn, runs at half speed",
    unit="% of the time",
    cells=lambda seeds: [Cell(study="levels", name=name, seed=seed) for name in _JOBS for seed in range(seeds)],
    measure=_levels,
    notes=("rerouting after a death is no level: without it a job stands still",),
)
