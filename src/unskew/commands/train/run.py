"""`unskew run`: options in, a run with its terminal view and dashboard, a summary out."""

from __future__ import annotations

import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from unskew.collector.events import Mode
from unskew.commands.common import JsonOption, StoreOption, checking_input, fail, locate, refuse, write_json
from unskew.runtime.options import DeviceKind, DType, OptionsError, RunOptions, check

if TYPE_CHECKING:
    from unskew.collector.paths import Store

DEFAULTS = RunOptions()
SCHEDULE_HELP = "Order of the chunks: gpipe, 1f1b, interleaved, zb-h1, zb-v or searched."
LAYOUT, MATHS, DEVICE, FAULTS, OUTPUT = "Layout", "Maths and data", "Device", "Faults and decisions", "What you see"


def run(
    tp: Annotated[int, typer.Option(help="Tensor-parallel shards.", rich_help_panel=LAYOUT)] = DEFAULTS.tp,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", rich_help_panel=LAYOUT)] = DEFAULTS.pp,
    dp: Annotated[int, typer.Option(help="Replicas.", rich_help_panel=LAYOUT)] = DEFAULTS.dp,
    schedule: Annotated[str, typer.Option(help=SCHEDULE_HELP, rich_help_panel=LAYOUT)] = DEFAULTS.schedule,
    layers: Annotated[int, typer.Option(help="Layers of the model.", rich_help_panel=MATHS)] = DEFAULTS.layers,
    dim: Annotated[int, typer.Option(help="Width of the model.", rich_help_panel=MATHS)] = DEFAULTS.dim,
    heads: Annotated[int, typer.Option(help="Attention heads.", rich_help_panel=MATHS)] = DEFAULTS.heads,
    tokens: Annotated[int, typer.Option(help="Most tokens of a micro-batch.", rich_help_panel=MATHS)] = DEFAULTS.tokens,
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches of an iteration.", rich_help_panel=MATHS)
    ] = DEFAULTS.micro_batches,
    iterations: Annotated[int, typer.Option(help="Iterations to train.", rich_help_panel=MATHS)] = DEFAULTS.iterations,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.", rich_help_panel=MATHS)] = DEFAULTS.seed,
    dtype: Annotated[
        DType | None, typer.Option(help="Number format.", show_default="float32; float64 with --verify", rich_help_panel=MATHS)
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A folder of text files.",
            show_default="the standard library's sources",
            rich_help_panel=MATHS,
        ),
    ] = None,
    device: Annotated[
        DeviceKind, typer.Option(help="What executes: auto = real when every rank has a core or GPU.", rich_help_panel=DEVICE)
    ] = DEFAULTS.device,
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The device that sleep and virtual emulate; for some ranks another: steady,4-7=older.",
            rich_help_panel=DEVICE,
        ),
    ] = DEFAULTS.profile,
    mode: Annotated[
        Mode, typer.Option(help="Optional changes of plan: left, asked for, or applied.", rich_help_panel=FAULTS)
    ] = DEFAULTS.mode,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A fault to inject: slow:rank=R,factor=X,at=I with until=I and phase=F|B|W if you like, "
            "kill:rank=R,at=I, hang:rank=R,at=I or freeze:rank=R,at=I; repeatable.",
            show_default="one slow rank at a sixth, one kill at half of the run",
            rich_help_panel=FAULTS,
        ),
    ] = None,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Inject none.", rich_help_panel=FAULTS)] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Also run the same seed without faults and compare the losses.", rich_help_panel=FAULTS),
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Serve the dashboard on 127.0.0.1.", rich_help_panel=OUTPUT)
    ] = True,
    store: StoreOption = None,
    json: JsonOption = None,
) -> None:
    """Train a small language model in parallel, disturb it, and watch it being kept fast."""
    from unskew.analytics.core.faults import parse_faults

    place = locate(store)
    options = RunOptions(
        tp=tp,
        pp=pp,
        dp=dp,
        schedule=schedule,
        layers=layers,
        dim=dim,
        heads=heads,
        tokens=tokens,
        micro_batches=micro_batches,
        iterations=iterations,
        seed=seed,
        dtype=dtype or ("float64" if verify else "float32"),
        corpus=corpus,
        device=device,
        profile=profile,
        mode=mode,
        store=str(place.root),
        verify=verify,
    )
    with checking_input():
        check(options)
        if fault and no_faults:
            refuse("--fault and --no-faults contradict each other: give one of them")
        specs = [] if no_faults else fault or default_faults(options)
        parsed = parse_faults(specs, ranks=options.ranks, iterations=iterations, schedule=schedule)
    perform(place, msgspec.structs.replace(options, faults=parsed), dashboard=dashboard, json=json)


def default_faults(options: RunOptions) -> list[str]:
    """One rank slow from a sixth of the run on and, where a replica can stand in, another one killed at half of it."""
    slow = f"slow:rank={options.ranks * 3 // 8},factor=1.8,at={options.iterations // 6}"
    kill = f"kill:rank={options.ranks * 6 // 8},at={options.iterations // 2}"
    return [slow, kill] if options.dp > 1 else [slow]


def perform(place: Store, options: RunOptions, *, dashboard: bool, json: Path | None) -> None:
    """Run, show, sum up; in a terminal the dashboard then stays up until Ctrl-C."""
    from rich.console import Console

    from unskew.collector.paths import StoreError, make_folder
    from unskew.dashboard_process import DashboardError, DashboardProcess
    from unskew.terminal.live import Screen
    from unskew.terminal.summary import summary_view

    with checking_input():
        make_folder(place.root)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop ends a run as Ctrl-C does
    console = Console()
    facts = [("store", str(place.root))]
    with ExitStack() as stack:
        try:
            served = stack.enter_context(DashboardProcess(place)) if dashboard else None
            from unskew.runtime.control import (
                launch,
            )

            if served is not None:
                try:
                    facts.append(("dashboard", served.ready()))
                except DashboardError as error:  # no reason not to train
                    facts.append(("dashboard", f"none, {error}"))
                    served = None
            with Screen(console, facts) as screen:
                summary = launch.run(options, on_event=screen.feed, on_tick=screen.tick)
        except KeyboardInterrupt:
            fail(f"stopped; what was logged until then is in {place.root}")
        except OptionsError as error:
            refuse(str(error))
        except (StoreError, DashboardError) as error:
            fail(str(error))
        console.print(summary_view(summary))
        write_json(json, summary)
        finished = screen.state.run.finished
        if finished is None or finished.status != "done":
            fail("the run did not finish" if finished is None else f"the run {finished.status}: {finished.reason}")
        if served is not None and console.is_terminal:
            with suppress(KeyboardInterrupt):
                console.print(f"The dashboard stays at {facts[-1][1]} until Ctrl-C.")
                signal.pause()
