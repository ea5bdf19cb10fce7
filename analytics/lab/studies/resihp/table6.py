"""ResiHP's table 6: fail-stop only; and the joint policy without each of its parts."""

from __future__ import annotations

from unskew.analytics.cluster.job import JOBS
from unskew.analytics.lab.studies.frame import Cell, Figures, Study
from unskew.analytics.lab.studies.resihp.paper import PAPER
from unskew.analytics.lab.studies.resihp.sessions import Make, aborted, cells, kills, model_of, play, scene
from unskew.analytics.policies.joint import JointPolicy
from unskew.analytics.policies.papers.resihp import ResihpPolicy
from unskew.analytics.policies.registry import POLICIES
from unskew.analytics.policies.unskew import UnskewPolicy

_KILLED: dict[str, Make] = {
    "oobleck": POLICIES["oobleck"], "recycle": POLICIES["recycle-staggered"], "resihp": ResihpPolicy, "unskew": UnskewPolicy,
    "joint": JointPolicy,
    "joint without the joint plan": lambda: JointPolicy(joint=False),
    "joint without the levels": lambda: JointPolicy(levels=False),
    "joint without the worth test": lambda: JointPolicy(worth=False),
}  # fmt: skip


def _table_6(cell: Cell) -> Figures:
    """Throughput as a share of fault-free, per policy, and the capacity that is left."""
    job, interval_s, hours = scene(cell)
    cluster_events = kills(job, interval_s, hours, cell.seed)
    found: Figures = {}
    for name, make in _KILLED.items():
        outcome = play(job, make, cluster_events, hours, cell.seed)
        found[f"{cell.name} {name}"] = outcome.effective
        found[f"{cell.name} capacity"] = outcome.capacity
        found |= aborted(f"{cell.name} {name}", outcome) if name in PAPER.table_6 else {}
    found[f"{cell.name} unskew - resihp"] = found[f"{cell.name} unskew"] - found[f"{cell.name} resihp"]  # type: ignore[operator]
    return found


def _table_6_paper() -> dict[str, float | None]:
    return {
        f"{model} {interval} {policy}": None if interval not in values else values[interval] / PAPER.fault_free[model]
        for policy, by_model in PAPER.table_6.items()
        for model, values in by_model.items()
        for interval in PAPER.interval_hours
    }


def _bound(figure: str) -> float | None:
    """Mean surviving capacity of a table 6 cell: kills at the ends of intervals."""
    model, interval = figure.split()[:2]
    devices = JOBS[PAPER.models[model]].devices
    kills_in_session = int(PAPER.session_hours[devices] / PAPER.interval_hours[interval])
    return 1.0 - (kills_in_session - 1) / 2 / devices


def _table_6_why(figure: str, published: float | None, _ours: float | None) -> str:
    bound = _bound(figure)
    if published is None and figure in _ABORTED:
        return "in the paper the job aborted"
    if published is not None and bound is not None and published > bound:
        return f"published is above the surviving capacity, {bound:.3f}: not at one GPU per kill with the same stages"
    if published is not None and bound is not None and figure.endswith("resihp") and published > 0.97 * bound:
        return f"published is within 3 % of the capacity, {bound:.3f}, though equation 3 strands GPUs"
    if figure.endswith("recycle") and published is not None:
        return "a session ends where both replicas of a stage have lost a GPU: with DP 2 two kills are enough"
    return ""


_ABORTED = frozenset(figure for figure, value in _table_6_paper().items() if value is None)


TABLE_6 = Study(
    name="resihp-table6",
    about="fail-stop only, throughput over fault-free (ResiHP table 6)",
    unit="share of fault-free",
    cells=cells("resihp-table6"),
    measure=_table_6,
    paper=_table_6_paper(),
    why=_table_6_why,
    errors_of=model_of,
    notes=(
        "one GPU is killed at the end of every interval; sessions of 4, 8, 16 h",
        "joint is also played without the joint plan, without the three levels, and without the worth test",
    ),
)
