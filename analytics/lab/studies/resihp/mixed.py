"""ResiHP's figures 10 and 11: fail-stop and fail-slow in turn, and what each level brings."""

from __future__ import annotations

from unskew.analytics.lab.studies.frame import Cell, Figures, Study
from unskew.analytics.lab.studies.resihp.paper import PAPER
from unskew.analytics.lab.studies.resihp.sessions import Make, aborted, cells, kills, model_of, play, scene
from unskew.analytics.policies.joint import JointPolicy
from unskew.analytics.policies.papers.resihp import ResihpPolicy
from unskew.analytics.policies.registry import POLICIES
from unskew.analytics.policies.unskew import UnskewPolicy

MIXED: dict[str, Make] = {
    "recycle": POLICIES["recycle-staggered"], "strengthened-recycle": POLICIES["strengthened-recycle"],
    "strengthened-oobleck": POLICIES["strengthened-oobleck"], "resihp": ResihpPolicy, "unskew": UnskewPolicy,
    "joint": JointPolicy,
}  # fmt: skip
LEVEL = 1e-3
"""Two throughputs that differ by less are level: the noise of a session's iterations."""


def two_levels() -> ResihpPolicy:
    """ResiHP without migration."""
    return ResihpPolicy(frozenset({"tp", "pp"}))


def _figure_10(cell: Cell) -> Figures:
    job, interval_s, hours = scene(cell)
    cluster_events = kills(job, interval_s, hours, cell.seed, slow=0.5)
    outcomes = {name: play(job, make, cluster_events, hours, cell.seed) for name, make in MIXED.items()}
    less = play(job, two_levels, cluster_events, hours, cell.seed).effective
    recycle = outcomes.pop("recycle")
    base = recycle.effective
    found: Figures = {f"{cell.name} {name}": outcome.effective / base for name, outcome in outcomes.items()}
    found |= aborted(f"{cell.name} recycle", recycle)
    resihp, unskew = (found[f"{cell.name} {name}"] for name in ("resihp", "unskew"))
    assert resihp is not None
    assert unskew is not None
    found[f"{cell.name} capacity"] = outcomes["unskew"].capacity / base
    found[f"{cell.name} unskew - resihp"] = unskew - resihp
    found["share of sessions: ResiHP at least its TP and PP"] = float(resihp >= less / base - LEVEL)
    found["share of sessions: ResiHP's TP and PP at least ReCycle"] = float(less >= base - LEVEL)
    return found


def _figure_10_why(_figure: str, published: float | None, ours: float | None) -> str:
    if ours is not None and published is not None and ours < 0.8 * published:
        return "our kills come at the ends of intervals, so jobs are whole at first; the capacity row is the most there is"
    if ours is not None and published is not None and ours > 1.3 * published:
        return "our ReCycle stops for good when a stage has no replica left, and trains nothing from then on"
    return ""


FIGURE_10 = Study(
    name="resihp-fig10",
    about="alternating fail-stop and fail-slow (a GPU at half speed), over ReCycle (ResiHP figure 10)",
    unit="x ReCycle",
    cells=cells("resihp-fig10"),
    measure=_figure_10,
    paper={
        f"{model} {interval} {policy}": value
        for model, intervals in PAPER.figure_10.items()
        for interval, values in intervals.items()
        for policy, value in zip(("strengthened-recycle", "strengthened-oobleck", "resihp"), values, strict=True)
    },
    why=_figure_10_why,
    errors_of=model_of,
)


# --- figure 11: what each level brings


def _figure_11_cells(seeds: int) -> list[Cell]:
    return [
        Cell(study="resihp-fig11", name=f"{model} {interval}", seed=seed, params={"model": model, "interval": interval})
        for model, intervals in PAPER.figure_11.items()
        for interval in intervals
        for seed in range(seeds)
    ]


def _figure_11(cell: Cell) -> Figures:
    """Over ReCycle, levels switched on one after another; the last rows are ours."""
    job, interval_s, hours = scene(cell)
    cluster_events = kills(job, interval_s, hours, cell.seed, slow=0.5)

    def effective(make: Make) -> float:
        return play(job, make, cluster_events, hours, cell.seed).effective

    base = effective(POLICIES["recycle-staggered"])
    steps = [
        effective(lambda: ResihpPolicy(frozenset({"tp"}))) / base,
        effective(two_levels) / base,
        effective(ResihpPolicy) / base,
    ]
    return {
        f"{cell.name} with exclusion": steps[0],
        f"{cell.name} + repartition": steps[1] - steps[0],
        f"{cell.name} + migration": steps[2] - steps[1],
        f"{cell.name} ResiHP": steps[2],
        f"{cell.name} + all of Unskew": effective(UnskewPolicy) / base - steps[2],
    }


_STEPS = ("with exclusion", "+ repartition", "+ migration", "ResiHP")

FIGURE_11 = Study(
    name="resihp-fig11",
    about="what each level of ResiHP brings, over ReCycle (ResiHP figure 11)",
    unit="x ReCycle",
    cells=_figure_11_cells,
    measure=_figure_11,
    paper={
        f"{model} {interval} {name}": value
        for model, intervals in PAPER.figure_11.items()
        for interval, values in intervals.items()
        for name, value in zip(_STEPS[:-1], values, strict=True)
    },
    why=lambda figure, _paper, _ours: "contains the baseline's own 1.0" if figure.endswith("exclusion") else "",
    errors_of=model_of,
    notes=("ReCycle aborts in many sessions, which makes ratios to it large",),
)
