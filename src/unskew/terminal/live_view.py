"""Draws a run's state for a terminal; pure, so that a test can look at the text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, isnan

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from unskew.analytics.core.outcome import OutcomeWord
from unskew.collector.events import DEVICE_NAMES
from unskew.terminal.live_state import IterationView, LiveState, RankView, SentenceView
from unskew.terminal.sentences import Tone

CURVE_COLUMNS = 60
WIDEST_GRID = 8
"""More stages than this are drawn as a strip of blocks."""
FIXED_ROWS = 17
"""Rows of the view that are neither ranks nor sentences."""

OUTCOMES: dict[OutcomeWord, str] = {"wrong": "bold red", "well": "green", "cannot_be_judged": "bold"}
BARS = "▁▂▃▄▅▆▇█"
TONES: dict[Tone, str] = {"plain": "", "good": "green", "bad": "red", "ask": "yellow", "quiet": "dim"}
Facts = Sequence[tuple[str, str]]
"""What the log does not have and the header shows: (label, value) such as ("store", "data/store")."""


def render(state: LiveState, facts: Facts, width: int, height: int) -> RenderableType:
    """The whole view in at most `width` columns; older sentences give way where `height` rows are too few."""
    parts: list[RenderableType] = [_header(state, facts), Padding(_progress(state, width), (1, 0, 0, 0))]
    if state.run.started is not None:
        parts.append(Text(state.outcome.sentence, OUTCOMES[state.outcome.outcome]))
    ranks = [*state.ranks.values()]
    if ranks:
        drawn = _grid(ranks) if _fits(ranks, width) else _strip(ranks)
        parts += [_heading("ranks: chunk time over prediction, then layers held · micro-batches executed"), drawn]
    if state.silent:
        parts.append(Text(f"\n{SILENT}", "bold red"))
    if state.waiting is not None:
        command = f"unskew approve {state.waiting} --by NAME --reason TEXT"
        parts.append(Text.assemble(("\n" + state.waiting + " waits for approval: ", "yellow"), (command, "bold yellow")))
    if state.lines:
        rank_rows = 1 + 2 * len(ranks) // _stages(ranks) if ranks else 0
        lines = newest(state.lines, width - 18, height - FIXED_ROWS - rank_rows)
        parts += [_heading("what happened after which iteration"), _lines(lines)]
    return Padding(Group(*parts), (1, 1))


SILENT = "nothing was written to the log for a minute, though a controller holds the run: its disk, or all ranks, stand still"


def _heading(text: str) -> RenderableType:
    return Padding(Rule(Text(text, "dim"), style="dim", align="left"), (1, 0, 0, 0))


def _header(state: LiveState, facts: Facts) -> RenderableType:
    started, finished = state.run.started, state.run.finished
    title = Text.assemble(("unskew", "bold cyan"), "  ", (started.run if started is not None else "starting", "bold"))
    if started is not None:
        title.append(
            f"   {DEVICE_NAMES.get(started.device_kind, started.device)} device, mode {state.run.mode}{_left(state)}", "dim"
        )
    if state.over:
        status = finished.status if finished is not None else "lost"
        title.append(f"   {status}", "bold green" if status == "done" else "bold red")
    about = Text("   ").join(Text.assemble((label, "dim"), " ", value) for label, value in facts)
    return Group(title, about)


def _progress(state: LiveState, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=10)
    table.add_column(justify="right", min_width=14)
    table.add_column()
    room = max(10, min(CURVE_COLUMNS, width - 34))
    bar = ProgressBar(
        total=state.iterations or 1, completed=state.done, width=room, complete_style="cyan", finished_style="green"
    )
    table.add_row("done", Text(_count(state), "bold"), bar)
    shown = state.shown
    if shown is None:
        return table
    past = state.past[-room:]
    rate = f"{shown.tokens_per_s:,.0f} tokens/s" if shown.tokens_per_s else ""
    table.add_row("iteration", str(shown.iteration), Text(rate, "dim"))
    losses = [one.loss for one in past if one.loss is not None]
    table.add_row("loss", _loss(state, shown) or "–", Text(sparkline(losses), "cyan"))
    if shown.measured_s is not None:
        table.add_row("time", f"{shown.measured_s:.2f} s", _times(past))
        table.add_row("predicted", *_prediction(shown.measured_s, shown.predicted_s, over=state.over))
    return table


def _loss(state: LiveState, shown: IterationView) -> str:
    """Empty where nobody read it, as of most short iterations of a training that is not ours: the log has NaN then."""
    started = state.run.started
    watched = started is not None and "command" in started.options
    return "" if shown.loss is None or (watched and isnan(shown.loss)) else f"{shown.loss:.4f}"


def _count(state: LiveState) -> str:
    return str(state.done) if state.iterations is None else f"{state.done} of {state.iterations}"


def _left(state: LiveState) -> str:
    """The time that the remaining iterations take at the mean of the last ten."""
    recent = [one.measured_s for one in state.past if one.measured_s is not None][-10:]
    if state.iterations is None or not recent or state.over:
        return ""
    seconds = round((state.iterations - state.done) * sum(recent) / len(recent))
    return f"   about {seconds // 60}:{seconds % 60:02d} left"


def _prediction(measured: float, predicted: float | None, *, over: bool) -> tuple[str, Text]:
    if predicted is None:
        return "", Text("not fitted" if over else "not fitted yet", "dim")
    off = measured / predicted - 1
    return f"{predicted:.2f} s", Text(f"measured {off:+.0%}".replace("%", " %"), _style(1 + off))


def _times(past: Sequence[IterationView]) -> Text:
    """The curve of the iteration times, each in the colour of its ratio to the prediction."""
    timed = [(one.measured_s, one.predicted_s) for one in past if one.measured_s is not None]
    curve = Text()
    for block, (measured, predicted) in zip(sparkline([measured for measured, _ in timed]), timed, strict=True):
        curve.append(block, "dim" if predicted is None else _style(measured / predicted))
    return curve


def sparkline(values: Sequence[float]) -> str:
    """One block character per value, scaled between the least and the greatest; a gap for what is not finite.

    >>> sparkline((1.0, 2.0, float("nan"), 3.0))
    '▁▅ █'
    """
    finite = [value for value in values if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] if isfinite(value) else " " for value in values
    )


def _style(ratio: float) -> str:
    """The colour of a time over its prediction."""
    for least, style in ((1.5, "bold red"), (1.25, "red"), (1.1, "yellow")):
        if ratio >= least:
            return style
    return "green"


def _stages(ranks: Sequence[RankView]) -> int:
    return 1 + max(view.role.stage for view in ranks)


def _fits(ranks: Sequence[RankView], width: int) -> bool:
    return _stages(ranks) <= WIDEST_GRID and 12 + 16 * _stages(ranks) <= width + 4


def _grid(ranks: Sequence[RankView]) -> Table:
    """Replicas down, stages across; in a cell the rank's ratio, then what it holds and how much it executes."""
    table = Table.grid(padding=(0, 2))
    table.show_header = True
    table.add_column(style="dim")
    for stage in range(_stages(ranks)):
        table.add_column(Text(f"stage {stage}", "dim"), min_width=12)
    places: dict[tuple[int, int], list[RankView]] = {}
    for view in ranks:
        places.setdefault((view.role.replica, view.role.stage), []).append(view)
    for replica in sorted({replica for replica, _ in places}):
        cells = (places.get((replica, stage), []) for stage in range(_stages(ranks)))
        table.add_row(f"replica {replica}", *(Text("\n").join(_cell(view) for view in cell) for cell in cells))
    return table


def _cell(view: RankView) -> Text:
    role = view.role
    text = Text.assemble((f"{role.rank} ", "bold"))
    if view.lost is not None:
        return text.append(view.lost, "bold red").append("\n" if view.holds else "\nholds nothing", "dim")
    text.append("■ ", "dim" if view.ratio is None else _style(view.ratio))
    text.append("–" if view.ratio is None else f"{view.ratio:.2f}", "dim" if view.ratio is None else _style(view.ratio))
    if not view.holds:
        return text.append("\nholds nothing", "dim")
    layers = f"{role.first_layer}–{role.end_layer - 1}" if role.n_layers > 1 else f"{role.first_layer}"
    return text.append(f"\n{layers} · {view.micro_batches}", "dim")


def _strip(ranks: Sequence[RankView]) -> Text:
    """One block per rank, and the slowest by name: for layouts too wide for a grid."""
    strip = Text()
    for view in ranks:
        strip.append("x" if view.lost else "■", "red" if view.lost else "dim" if view.ratio is None else _style(view.ratio))
    slowest = max((view for view in ranks if view.ratio is not None), key=lambda v: v.ratio or 0.0, default=None)
    return strip if slowest is None else strip.append(f"\nslowest: rank {slowest.role.rank}, {slowest.ratio:.2f}", "dim")


def newest(lines: tuple[SentenceView, ...], columns: int, rows: int) -> tuple[SentenceView, ...]:
    """The last lines that fit into `rows` rows of `columns` columns; always at least one."""
    used = 0
    for kept, line in enumerate(reversed(lines)):
        used += sum(1 + len(text) // max(columns, 1) for text in (line.sentence.text, line.sentence.then) if text)
        if used > rows:
            return lines[len(lines) - max(kept, 1) :]
    return lines


def _lines(lines: tuple[SentenceView, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", min_width=4)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for line in lines:
        where = "" if line.iteration is None else str(line.iteration)
        table.add_row(where, line.sentence.topic, Text(line.sentence.text, TONES[line.sentence.tone]))
        if line.sentence.then:
            table.add_row("", "", Text(f"next: {line.sentence.then}", "dim"))
    return table


def plain(state: LiveState) -> str:
    """The state in one line, for logs; all figures are of the iteration that it names."""
    parts = [f"{_count(state)} done"]
    if (shown := state.shown) is not None:
        loss = _loss(state, shown)
        parts.append(f"iteration {shown.iteration}" + (f": loss {loss}" if loss else ""))
        if shown.tokens_per_s:
            parts.append(f"{shown.tokens_per_s:,.0f} tokens/s")
        if shown.measured_s is not None:
            predicted = "" if shown.predicted_s is None else f", predicted {shown.predicted_s:.2f} s"
            parts.append(f"{shown.measured_s:.2f} s{predicted}")
    return "  ".join(parts)
