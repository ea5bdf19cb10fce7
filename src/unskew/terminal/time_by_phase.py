"""Where the time of a training that is not ours went: per rank, the mean of each phase of an iteration; and its memory."""

from __future__ import annotations

from collections import Counter

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unskew.collector.events import Event, Heartbeat, IterationCommitted, Span

PHASES = {
    "data_wait": "data",
    "F": "forward",
    "B": "backward",
    "all_reduce": "waiting",
    "optimizer": "optimizer",
    "other": "other",
    "gc": "garbage",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
}
USUAL = 6
"""The others are shown where there is such a thing."""


class PhaseTimes:
    """Sums over the log's spans; waiting within a phase counts as waiting."""

    def __init__(self) -> None:
        self.us: Counter[tuple[int, str]] = Counter()
        self.iterations: Counter[int] = Counter()
        self.peak_bytes: dict[int, int] = {}

    def take(self, event: Event | None) -> None:
        """One event of the log."""
        if isinstance(event, IterationCommitted):
            self.iterations[event.rank] += 1
        elif isinstance(event, Heartbeat) and event.peak_bytes is not None:
            self.peak_bytes[event.rank] = event.peak_bytes
        elif isinstance(event, Span) and event.kind in PHASES:
            waited_us = (event.wait_dp_us or 0) + (event.wait_tp_us or 0) + (event.wait_pp_us or 0)
            own_us = event.wall_us - waited_us if event.compute_us is None else event.compute_us + (event.runq_us or 0)
            self.us[event.rank, event.kind] += own_us
            self.us[event.rank, "all_reduce"] += waited_us


def phase_table(times: PhaseTimes) -> RenderableType:
    """Milliseconds an iteration, and the most memory; what a rank takes longest for, compared with the others, is bold."""
    table = Table.grid(padding=(0, 2))
    table.show_header = True
    table.add_column(Text("mean ms", "dim"), style="dim")
    seen = {kind for _, kind in times.us}
    phases = [kind for number, kind in enumerate(PHASES) if number < USUAL or kind in seen]
    for kind in phases:
        table.add_column(Text(PHASES[kind], "dim"), justify="right", min_width=5)
    if times.peak_bytes:
        table.add_column(Text("peak MB", "dim"), justify="right", min_width=5)
    rows = {
        rank: {kind: times.us[rank, kind] / 1000 / n for kind in phases} for rank, n in sorted(times.iterations.items()) if n
    }
    for rank, row in rows.items():
        most = {kind: max(of[kind] for of in rows.values()) for kind in phases}
        cells = [Text(f"{ms:.2f}", "bold" if len(rows) > 1 and 0 < most[kind] == ms else "") for kind, ms in row.items()]
        memory = [f"{times.peak_bytes[rank] / 1e6:.0f}"] if rank in times.peak_bytes else []
        table.add_row(f"rank {rank}", *cells, *memory)
    return Padding(table, (0, 1, 1, 1))
