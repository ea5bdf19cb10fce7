"""The result of a run, as people read it: the same facts as `unskew run --json`."""

from __future__ import annotations

from math import isnan
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from unskew.runtime.control.summary import PlanSummary, Summary

DONE = {
    "slow": "is slowed from", "slow_link": "has a slow link from", "kill": "is killed in", "hang": "is made to hang in",
    "freeze": "is frozen in", "exception": "meets an error in", "segfault": "ends by SIGSEGV in",
    "full_disk": "has a full disk from", "rejoin": "is started again in",
}  # fmt: skip
SURE = {(True, False): "green", (False, True): "red", (False, False): ""}
"""The colour of a saving, by whether its interval lies above and below zero."""


def summary_view(summary: Summary) -> RenderableType:
    """Facts first, then what was found, then what each plan was worth."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    for label, text in _facts(summary):
        facts.add_row(label, text)
    parts: list[RenderableType] = [Text(f"run {summary.run_id}", "bold"), facts]
    if len(summary.plans) > 1:
        parts += [Text(), _plans(summary.plans)]
    return Padding(Group(*parts), (1, 1))


def _facts(summary: Summary) -> list[tuple[str, str]]:
    times, events = summary.iteration_s, summary.events
    losses = [one for one in summary.losses if not isnan(one)]  # of a short iteration that is not ours it is not read
    lacking = f" in the log, of {summary.committed} that were committed" if summary.committed > summary.iterations else ""
    resumed = f", after the first {summary.resumed_at} of {summary.resumed_from}" if summary.resumed_from else ""
    facts = [("device", summary.device), ("iterations", f"{summary.iterations}{lacking}{resumed}")]
    if losses:
        facts.append(("loss", f"{losses[0]:.4f} to {losses[-1]:.4f}"))
    if times:
        facts.append(("iteration time", f"{median(times):.3f} s (median)"))
    facts += [("fault", f"rank {f.rank} {DONE.get(f.kind, f.kind)} iteration {f.at_iteration}") for f in summary.faults]
    facts += [("verdict", verdict.sentence) for verdict in summary.verdicts]
    facts.append(("outcome", summary.outcome.sentence))
    types = ", ".join(f"{n:,} {name or 'of unknown type'}" for name, n in events.dropped_types.items())
    dropped = f"{events.dropped:,} dropped{f' ({types})' if types else ''}"
    counts = f"{events.written:,} written, {events.stored:,} stored, {dropped}"
    facts.append(("events", f"{counts}, {_completeness(summary)}"))
    if summary.verify is not None:
        difference = summary.verify.max_abs_loss_difference
        facts.append(("verified", f"losses differ from those of the undisturbed run by at most {difference:.1e}"))
    return facts


def _completeness(summary: Summary) -> str:
    events = summary.events
    if events.log_complete:
        return "log complete"
    if events.unwritten:
        return f"log incomplete: {events.unwritten:,} more could not be written"
    if summary.committed <= summary.iterations and not events.dropped:
        return "log late: some votes came before every rank had flushed its events"
    return "log incomplete"


def _plans(plans: tuple[PlanSummary, ...]) -> Table:
    """Two lines a plan, which fit into any terminal: why it came, and what it was worth."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for plan in plans:
        since = Text.assemble(f"from iteration {plan.at_iteration}", (f": {plan.reason}" if plan.reason else "", "dim"))
        grid.add_row(f"plan {plan.plan_version}", since)
        if plan.predicted_s is not None or plan.measured_s is not None:
            grid.add_row("", _worth(plan))
    return grid


def _worth(plan: PlanSummary) -> Text:
    times = f"predicted {_seconds(plan.predicted_s)}, measured {_seconds(plan.measured_s)}"
    if plan.baseline_s is None:
        return Text(times)
    text = Text(f"{times}, without it {_seconds(plan.baseline_s)}")
    if plan.measured_s is not None and plan.interval_s is not None:
        low, high = plan.interval_s
        saved = f"{plan.baseline_s - plan.measured_s:+.2f} s saved an iteration"
        text.append(f": {saved} (95 %: {low:+.2f} to {high:+.2f} s, n = {plan.n})", SURE[low > 0, high < 0])
    return text


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"
