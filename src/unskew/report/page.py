"""The report of a run: what was wrong, what was done about it and what that was worth, with the charts to see it by."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import reduce
from html import escape
from statistics import median

import msgspec

from unskew.analytics.core.outcome import OutcomeWord, outcome_of_run
from unskew.analytics.core.run_state import ProposalState, RunState, VerdictState, fold
from unskew.collector.events import CONTROL, PlanProposed, tag_of
from unskew.collector.files.tail import decode_event
from unskew.collector.read.reader import Reader
from unskew.report.charts import ChartMark, Line, bars, heatmap, lines
from unskew.report.style import STYLE
from unskew.terminal.sentences import Sentence, sentence_of

COLUMNS = 200
"""More iterations than this are taken together."""
MOST_RANKS = 64
PHASES = (("data_wait", "data"), ("F", "forward"), ("B", "backward"), ("W", "weights"), ("waiting", "waiting"),
          ("optimizer", "optimizer"), ("other", "other"))  # fmt: skip
TONES: dict[OutcomeWord, str] = {"wrong": "bad", "well": "good", "cannot_be_judged": "quiet"}
QUIET = ("predict",)


class Story(msgspec.Struct, frozen=True):
    """What the control events of a run amount to, and each as a sentence, with its time."""

    state: RunState
    sentences: tuple[tuple[int, Sentence], ...]


def report(reader: Reader, run: str, *, controlled: bool = False) -> str:
    """The page. `controlled`: a living controller holds the run."""
    story = _story(reader, run)
    state = story.state
    outcome = outcome_of_run(state, controlled=controlled)
    marks = _marks(state)
    verdicts = sorted(state.verdicts.values(), key=lambda one: (not state.is_open(one), one.verdict.at_iteration))
    sections = [
        _head(state, run, TONES[outcome.outcome], outcome.sentence),
        _section("Verdicts", "".join(_verdict(state, one) for one in verdicts)),
        _section("What was done", "".join(_proposal(one) for one in state.proposals.values())),
        _section("Time of an iteration", _times(reader, run, marks), "measured, and as it was predicted"),
        _section("Compute time by rank", _ranks(reader, run, marks), "over what the work should take on a healthy device"),
        _section("Where the time goes", _phases(reader, run), "mean of an iteration, by rank"),
        _section("What happened", _events(story.sentences)),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Unskew: {escape(run)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>'
        f"{''.join(sections)}</main></body></html>\n"
    )


def _story(reader: Reader, run: str) -> Story:
    rows = reader.sql(
        "select at_us, payload::varchar as line from events where run = ? and list_contains(?, type) "
        "order by at_us, writer, seq",
        [run, [tag_of(kind) for kind in CONTROL]],
    )
    events = [(at_us, event) for at_us, line in rows.iter_rows() if (event := decode_event(line.encode())) is not None]
    state = reduce(lambda state, one: fold(state, one[1], one[0]), events, RunState())
    sentences = tuple((at_us, sentence) for at_us, event in events if (sentence := sentence_of(event)) is not None)
    return Story(state, sentences)


def _section(title: str, body: str, hint: str = "") -> str:
    note = f"<small>{escape(hint)}</small>" if hint else ""
    return f"<section><h2>{escape(title)}{note}</h2>{body}</section>" if body else ""


def _head(state: RunState, run: str, tone: str, sentence: str) -> str:
    started, finished = state.started, state.finished
    facts = [] if started is None else [f"{started.ranks} ranks", started.device, f"mode {started.mode}"]
    if finished is not None:
        facts.append(f"{finished.status} after {finished.iterations} iterations")
    command = " ".join(map(str, started.options.get("command", ()))) if started is not None else ""
    shown = f"<code>{escape(command)}</code>" if command else ""
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return (
        f'<header><p class="brand">Unskew<span>{made}</span></p><h1>{escape(run)}</h1><p class="facts">'
        f"{''.join(f'<span>{escape(fact)}</span>' for fact in facts)}</p>{shown}"
        f'<p class="outcome {tone}">{escape(sentence)}</p></header>'
    )


def _verdict(state: RunState, one: VerdictState) -> str:
    verdict, open_ = one.verdict, state.is_open(one)
    until = "" if open_ or verdict.until_iteration is None else f", until {verdict.until_iteration}"
    closed = f"over: {one.closed.reason}" if one.closed is not None else "open" if open_ else "over"
    step = f"next: {verdict.evidence['next_step']}" if "next_step" in verdict.evidence else ""
    return (
        f'<article class="card {"bad" if open_ else "over"}"><h3>{escape(verdict.sentence)}</h3>'
        f"<p>{escape(one.onset + until)} · {escape(closed)} · {100 * verdict.confidence:.0f} % sure</p>"
        f"{f'<p>{escape(step)}</p>' if step else ''}</article>"
    )


def _proposal(one: ProposalState) -> str:
    proposed, scored = one.proposed, one.scored
    facts: list[tuple[str, str]] = [("state", one.status)]
    if proposed.gain_percent is not None:
        facts.append(("gain, predicted", f"{proposed.gain_percent:.1f} %{_sides(proposed)}"))
    if scored is not None and scored.effect_s is not None and scored.baseline_s:
        low, high = (100 * side / scored.baseline_s for side in scored.interval_s or (scored.effect_s, scored.effect_s))
        gain = f"{100 * scored.effect_s / scored.baseline_s:.1f} % ({low:.1f} to {high:.1f})"
        facts.append(("gain, measured", gain))
    elif scored is not None:
        facts.append(("gain, measured", f"none stated: {scored.void}"))
    for when, value in (("an iteration before", proposed.baseline_us), ("predicted", proposed.predicted_us)):
        if value is not None:
            facts.append((when, f"{value / 1000:.1f} ms"))
    if scored is not None and scored.measured_s is not None:
        facts.append(("measured", f"{1000 * scored.measured_s:.1f} ms"))
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    tone = {"scored": "good", "applied": "good", "open": "ask", "failed": "bad"}.get(one.status, "over")
    return (
        f'<article class="card {tone}"><h3>{escape(proposed.proposal)}: {escape(proposed.change)}</h3>'
        f"<p>{escape(proposed.reason)}</p><dl>{shown}</dl></article>"
    )


def _sides(proposed: PlanProposed) -> str:
    """The 95 % interval of its gain, where one is stated."""
    sides, baseline_us = proposed.evidence.get("gain_interval_us"), proposed.baseline_us
    if not sides or not baseline_us:
        return ""
    low, high = (100 * side / baseline_us for side in sides)
    return f" ({low:.1f} to {high:.1f})"


def _times(reader: Reader, run: str, marks: Sequence[ChartMark]) -> str:
    rows = reader.sql("select iteration, iteration_us, predicted_us from iterations where run = ? order by iteration", [run])
    found, each = rows.rows(), _grain(rows.height)
    measured, predicted = [], []
    for first in range(0, len(found), each):
        some = found[first : first + each]
        measured.append((some[0][0], median(row[1] for row in some) / 1000))
        if known := [row[2] for row in some if row[2] is not None]:
            predicted.append((some[0][0], median(known) / 1000))
    key = '<p class="key"><i class="measured"></i>measured <i class="predicted"></i>predicted <i class="verdict"></i>verdict '
    chart = lines([Line("predicted", "predicted", predicted), Line("measured", "measured", measured)], marks)
    return chart and f'{chart}{key}<i class="plan"></i>change</p>'


def _grain(n: int) -> int:
    return -(-n // COLUMNS) or 1


def _ranks(reader: Reader, run: str, marks: Sequence[ChartMark]) -> str:
    first, last = reader.sql("select min(iteration), max(iteration) from judged where run = ?", [run]).row(0)
    if first is None:
        return ""
    grain = _grain(last - first + 1)
    rows = reader.sql(
        "select rank, (iteration - $first) // $grain as x, sum(measured_us) / sum(healthy_us) as ratio from judged "
        "where run = $run and healthy_us > 0 group by 1, 2 order by 1, 2",
        {"run": run, "first": first, "grain": grain},
    )
    cells: dict[int, dict[int, float]] = {}
    for rank, x, ratio in rows.iter_rows():
        cells.setdefault(rank, {})[x] = ratio
    columns = (last - first) // grain + 1
    shown = [(f"rank {rank}", [of.get(x) for x in range(columns)]) for rank, of in [*cells.items()][:MOST_RANKS]]
    more = f"<p>{len(cells) - MOST_RANKS} more ranks are not shown</p>" if len(cells) > MOST_RANKS else ""
    key = '<p class="key"><i class="slow"></i>slower than expected <i class="fast"></i>faster</p>'
    chart = heatmap(shown, first, last, marks)
    return chart and f"{chart}{key}{more}"


def _phases(reader: Reader, run: str) -> str:
    rows = reader.sql(
        "select rank, kind, sum(wall_us - coalesce(wait_dp_us, 0))::double as us, "
        "sum(coalesce(wait_dp_us, 0))::double as waited_us, "
        "count(distinct iteration) as n from spans where run = ? group by all order by rank",
        [run],
    )
    of: dict[int, dict[str, float]] = {}
    n: dict[int, int] = {}
    for rank, kind, us, waited_us, iterations in rows.iter_rows():
        mine = of.setdefault(rank, dict.fromkeys((kind for kind, _ in PHASES), 0.0))
        waits = kind in ("all_reduce", "all_gather", "reduce_scatter", "send", "recv")
        part = "waiting" if waits else kind if kind in mine else "other"
        mine[part] += us
        mine["waiting"] += waited_us
        n[rank] = max(n.get(rank, 0), iterations)
    shown = [
        (f"rank {rank}", [(f"p-{name}", name, mine[kind] / 1000 / max(n[rank], 1)) for kind, name in PHASES])
        for rank, mine in [*of.items()][:MOST_RANKS]
    ]
    used = [name for place, (_, name) in enumerate(PHASES) if any(parts[place][2] > 0 for _, parts in shown)]
    key = "".join(f'<i class="p-{name}"></i>{name} ' for name in used)
    chart = bars(shown)
    return chart and f'{chart}<p class="key">{key}</p>'


def _events(sentences: Sequence[tuple[int, Sentence]]) -> str:
    shown = [(at_us, one) for at_us, one in sentences if one.topic not in QUIET]
    rows = "".join(
        f"<tr><td>{datetime.fromtimestamp(at_us / 1e6, UTC):%H:%M:%S}</td><td>{escape(one.topic)}</td>"
        f'<td class="{one.tone}">{escape(one.text)}</td></tr>'
        for at_us, one in shown
    )
    return f"<table><tbody>{rows}</tbody></table>" if rows else ""


def _marks(state: RunState) -> list[ChartMark]:
    named = [one.verdict for one in state.verdicts.values()]
    verdicts = [ChartMark(one.at_iteration, "verdict", one.sentence) for one in named]
    later = [one.event for one in state.plans[1:]]
    plans = [ChartMark(one.iteration, "plan", f"plan {one.plan_version}: {one.reason}") for one in later]
    return [*verdicts, *plans]
