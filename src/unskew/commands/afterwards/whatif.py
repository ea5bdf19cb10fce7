"""`unskew whatif`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.commands.common import JsonOption, StoreOption, checking_input, known_run, locate, refuse, warn, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from unskew.analytics.diagnosis.trace.section import TraceSection

SHOWN_WORKERS = 5


def whatif(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Which run.", show_default=False)],
    without_device: Annotated[
        list[int] | None,
        typer.Option("--without-device", metavar="R", help="As if rank R were as fast as its peers; repeatable."),
    ] = None,
    equal_stages: Annotated[bool, typer.Option("--equal-stages", help="As if all stages took their mean.")] = False,
    balanced_lengths: Annotated[
        bool, typer.Option("--balanced-lengths", help="As if all micro-batches carried equal work.")
    ] = False,
    plan: Annotated[
        int | None,
        typer.Option("--plan", metavar="N", help="Only the iterations under plan N.", show_default="the one with the most"),
    ] = None,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Report what the iterations of a run would have cost otherwise: its operations are replayed with changed durations."""
    import msgspec

    from unskew.analytics.diagnosis.diagnose import observability
    from unskew.analytics.diagnosis.sections import sections_of
    from unskew.analytics.diagnosis.trace.whatif import ask, what_if
    from unskew.collector.read.reader import open_store
    from unskew.edge.load_run import load_run
    from unskew.terminal.console import SafeConsole

    place = locate(store)
    known_run(place, run)
    with checking_input():
        reader = open_store(place)
    with reader:
        warn(reader.problems)
        log = load_run(reader, run)
    if observability(log) != "chunks":
        refuse(f"run {run} has no forward and backward times per micro-batch, which a replay needs")
    sections, _, problems = sections_of(log)
    if not sections:
        refuse(f"run {run} cannot be replayed: {'; '.join(problems)}")
    section = chosen(sections, plan)
    with checking_input("--without-device:"):
        asked = ask(section, ranks=without_device or (), equal=equal_stages, balanced=balanced_lengths)
    found = what_if(section.recording)
    answers = {"asked": msgspec.to_builtins(asked)}
    plans = [stretch(one) for one in sections]
    data: dict[str, Any] = {
        "run_id": run,
        "epoch": section.plan_version,
        "plans": plans,
        "not_replayed": ([f"all but {log.sample.what}"] if log.sample else []) + problems,
        **msgspec.to_builtins(found),
        **answers,
    }
    write_json(json, data)
    SafeConsole().print(shown(data))


def chosen(sections: list[TraceSection], plan: int | None) -> TraceSection:
    """The section of a plan, or the one with the most iterations."""
    if plan is None:
        return max(sections, key=lambda section: len(section.recording.iterations))
    known = [section.plan_version for section in sections]
    if plan not in known:
        refuse(f"--plan {plan} has no iterations that can be replayed, allowed: {', '.join(map(str, known))}")
    return sections[known.index(plan)]


def stretch(section: TraceSection) -> dict[str, int]:
    """A plan, and which of the run's iterations were replayed under it."""
    numbers = section.recording.iterations
    return {"epoch": section.plan_version, "iterations": len(numbers), "first": numbers[0], "last": numbers[-1]}


def shown(data: dict[str, Any]) -> RenderableType:
    """The answer for people; the simulator's own error is beside it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    here = next(one for one in data["plans"] if one["epoch"] == data["epoch"])
    which = f", plan {data['epoch']}" if len(data["plans"]) > 1 else ""
    parts: list[RenderableType] = [Text(f"{data['run_id']}{which}: {_span(here)}", "bold")]
    others = [f"plan {one['epoch']}, {_span(one)}" for one in data["plans"] if one is not here]
    if others:
        parts.append(Text(f"not in these figures: {'; '.join(others)}; see them with --plan N", "dim"))
    parts += [Text(f"not replayed: {sentence}", "dim") for sentence in data["not_replayed"]]
    parts += [
        Text(
            f"an iteration took {data['measured_us'] / 1e6:.3f} s, {data['slowdown']:.3f} times the ideal of "
            f"{data['ideal_us'] / 1e6:.3f} s, where every kind of work takes its mean"
        ),
        Text(
            f"how far to trust this: replayed unchanged, iterations are {100 * data['simulator_error']:.1f} % off the measured"
        ),
    ]
    if data["m_w"] is not None:
        last = f"; with the last stage at ideal pace {100 * data['m_s']:.0f} %" if data["m_s"] is not None else ""
        parts.append(
            Text(f"with the slowest 3 % of the ranks at ideal pace {100 * data['m_w']:.0f} % of that loss would be gone{last}")
        )
    worst = sorted(data["worker_slowdown"].items(), key=lambda item: -item[1])[:SHOWN_WORKERS]
    slowest = ", ".join(f"rank {rank} {slow:.3f}" for rank, slow in worst)
    parts.append(Text(f"times the ideal when only one rank is as it was: {slowest}"))
    if data["asked"]:
        grid = Table(header_style="bold")
        for name in ("if", "s an iteration", "saves"):
            grid.add_column(name, justify="left" if name == "if" else "right")
        for one in data["asked"]:
            grid.add_row(one["what"], f"{one['iteration_us'] / 1e6:.3f}", f"{one['saves_percent']:.1f} %")
        parts.append(grid)
    return Group(*parts)


def _span(one: dict[str, int]) -> str:
    """Its iterations in words; some in between may lack operations."""
    count = one["iterations"]
    if count == 1:
        return f"iteration {one['first']}"
    return f"{count} iterations, {one['first']} to {one['last']}"
