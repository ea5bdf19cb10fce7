"""What a run came to, as people read it: the same facts as `unskew run --json`."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from unskew.runtime.summary import PlanSummary, Summary


def summary_view(summary: Summary) -> RenderableType:
    """Facts first, then what was found, then what each plan was worth."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    for label, text in _facts(summary):
        facts.add_row(label, text)
    parts: list[RenderableType] = [Text(f"run {summary.run_id}", "bold"), facts]
    if len(summary.plans) > 1:
        parts.append(_plans(summary.plans))
    return Padding(Group(*parts), (1, 1))


def _facts(summary: Summary) -> list[tuple[str, str]]:
    losses, times, events = summary.losses, summary.iteration_s, summary.events
    facts = [("device", summary.device), ("iterations", str(summary.iterations))]
    if losses:
        facts.append(("loss", f"{losses[0]:.4f} to {losses[-1]:.4f}"))
    if times:
        facts.append(("iteration time", f"{median(times):.3f} s (median)"))
    facts += [("fault", f"{fault.kind} of rank {fault.rank} at iteration {fault.at_iteration}") for fault in summary.faults]
    facts += [("verdict", verdict.sentence) for verdict in summary.verdicts]
    complete = "log complete" if events.log_complete else "log late: some votes came before every rank had flushed its events"
    facts.append(("events", f"{events.written:,} written, {events.stored:,} stored, {events.dropped:,} dropped, {complete}"))
    if summary.verify is not None:
        difference = summary.verify.max_abs_loss_difference
        facts.append(("verified", f"losses differ from those of the undisturbed run by at most {difference:.1e}"))
    return facts


def _plans(plans: tuple[PlanSummary, ...]) -> Table:
    table = Table(title="plans", title_justify="left", title_style="bold")
    table.add_column("plan", justify="right")
    table.add_column("from", justify="right")
    table.add_column("reason")
    for column in ("predicted", "measured", "without it", "saved (95 %)", "n"):
        table.add_column(column, justify="right")
    for plan in plans:
        numbers = (_seconds(plan.predicted_s), _seconds(plan.measured_s), _seconds(plan.baseline_s), _saved(plan))
        table.add_row(str(plan.epoch), str(plan.at_iteration), plan.reason, *numbers, str(plan.n or "–"))
    return table


def _saved(plan: PlanSummary) -> str:
    """Seconds an iteration that the change saved, with the interval of the mean."""
    if plan.baseline_s is None or plan.measured_s is None or plan.interval_s is None:
        return "–"
    low, high = plan.interval_s
    return f"{plan.baseline_s - plan.measured_s:+.2f} s ({low:+.2f} to {high:+.2f})"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"
