"""`unskew whatif`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.commands.common import JsonOption, StoreOption, checking_input, known_run, locate, refuse, warn, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from unskew.analytics.diagnosis.section import Section

SHOWN_WORKERS = 5


def whatif(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    without_device: Annotated[
        list[int] | None,
        typer.Option("--without-device", metavar="R", help="As if rank R were as fast as its peers; repeatable."),
    ] = None,
    equal_stages: Annotated[bool, typer.Option("--equal-stages", help="As if all stages took their mean.")] = False,
    balanced_lengths: Annotated[
        bool, typer.Option("--balanced-lengths", help="As if all micro-batches carried equal work.")
    ] = False,
    epoch: Annotated[
        int | None, typer.Option("--epoch", metavar="N", help="Under which plan.", show_default="the longest in force")
    ] = None,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Say what the iterations of a run would have cost otherwise: its operations are replayed with changed durations."""
    import msgspec
    from rich.console import Console

    from unskew.analytics.diagnosis.diagnose import observability, sections_of
    from unskew.analytics.diagnosis.load import load_run
    from unskew.analytics.diagnosis.whatif import ask, what_if
    from unskew.collector.reader import open_store

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
    section = chosen(sections, epoch)
    with checking_input():
        asked = ask(section, ranks=without_device or (), equal=equal_stages, balanced=balanced_lengths)
    found = what_if(section.recording)
    answers = {"asked": msgspec.to_builtins(asked)}
    data: dict[str, Any] = {"run_id": run, "epoch": section.epoch, **msgspec.to_builtins(found), **answers}
    write_json(json, data)
    Console().print(shown(data))


def chosen(sections: list[Section], epoch: int | None) -> Section:
    """The section of a plan, or the one with the most iterations."""
    if epoch is None:
        return max(sections, key=lambda section: len(section.recording.iterations))
    known = [section.epoch for section in sections]
    if epoch not in known:
        refuse(f"--epoch {epoch} has no iterations that can be replayed, allowed: {', '.join(map(str, known))}")
    return sections[known.index(epoch)]


def shown(data: dict[str, Any]) -> RenderableType:
    """The answer for people; the simulator's own error stands beside it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    error = f"the replay itself is {100 * data['simulator_error']:.1f} % off the measured iterations"
    over = f"{data['measured_us'] / 1e6:.3f} s an iteration, mean of {len(data['iteration_slowdown'])}"
    head = f"{data['run_id']}, plan {data['epoch']}: {over}"
    parts: list[RenderableType] = [
        Text(head, "bold"),
        Text(f"slowdown {data['slowdown']:.3f} against ideal ({data['ideal_us'] / 1e6:.3f} s); {error}"),
    ]
    if data["m_w"] is not None:
        last = f", the last stage {100 * data['m_s']:.0f} %" if data["m_s"] is not None else ""
        parts.append(Text(f"of what is lost the slowest 3 % of the workers explain {100 * data['m_w']:.0f} %{last}"))
    worst = sorted(data["worker_slowdown"].items(), key=lambda item: -item[1])[:SHOWN_WORKERS]
    parts.append(Text("slowest workers: " + ", ".join(f"rank {rank} {slow:.3f}" for rank, slow in worst)))
    if data["asked"]:
        grid = Table(header_style="bold")
        for name in ("if", "s an iteration", "saves"):
            grid.add_column(name, justify="left" if name == "if" else "right")
        for one in data["asked"]:
            grid.add_row(one["what"], f"{one['iteration_us'] / 1e6:.3f}", f"{one['saves_percent']:.1f} %")
        parts.append(grid)
    return Group(*parts)
