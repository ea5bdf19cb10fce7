"""`unskew run`: options in, a run with its terminal view and dashboard, a summary out."""

from __future__ import annotations

import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from unskew.commands.afterwards.diagnose import judged_at_its_end
from unskew.commands.common import (
    JsonOption,
    SharedOption,
    StoreOption,
    as_ctrl_c,
    checking_input,
    fail,
    known_run,
    locate,
    refuse,
    rights_of_new,
    starting,
    warn,
    write_json,
)
from unskew.commands.parameters import asks_for
from unskew.runtime.control.allowed import check, check_together
from unskew.runtime.options import CHECKPOINTS, FAULTS, OptionsError, RunOptions

if TYPE_CHECKING:
    from unskew.collector.files.tail import Entry
    from unskew.collector.paths import Store
    from unskew.runtime.control.summary import Summary

OUTPUT = "What you see"


@asks_for(RunOptions, faults=("fault", "no_faults"))
def run(
    asked: dict[str, Any],
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A fault to inject: slow:rank=R,factor=X,at=I with until=I and phase=F|B|W if you like, "
            "kill:rank=R,at=I, hang, freeze, exception, segfault, full_disk, rejoin likewise, "
            "slow_link:rank=R,peer=S,delay_ms=X,at=I or random:seed=S,every=N; repeatable.",
            show_default="one slow rank at a sixth (from iteration 9 on), one kill at half of the run",
            rich_help_panel=FAULTS,
        ),
    ] = None,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Inject none.", rich_help_panel=FAULTS)] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Serve the dashboard on 127.0.0.1.", rich_help_panel=OUTPUT)
    ] = True,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Go on with a run: in its own ranks while these wait for a controller, else from its newest checkpoint, on "
            "other ranks and devices and with more --iterations if you like.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    store: StoreOption = None,
    shared: SharedOption = False,
    json: JsonOption = None,
    *,
    context: typer.Context,
) -> None:
    """Train a small language model in parallel, disturb it, and watch it being kept fast."""
    from unskew.analytics.cluster.random_faults import parse_all

    place, living = locate(store), None
    sources = {name: context.get_parameter_source(name) for name in asked}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    with checking_input():
        check_together(given)
    if resume is None:
        asked.setdefault("dtype", "float64" if asked["verify"] else "float32")
        options = RunOptions(**asked, store=str(place.root))
    else:
        options, living = resumed_options(place, resume, asked, given)
    with checking_input():
        if options.model is not None or options.data is not None:
            from unskew.runtime.control.launch import prepared

            options = prepared(options)
        options = options.with_costs().with_degrees()
        check(options)
        if options.rank_mib:
            from unskew.runtime.control.launch import check_room

            check_room(options)
    if fault and no_faults:
        refuse("--fault and --no-faults contradict each other: give one of them")
    if living is not None:
        if fault:
            refuse(f"--fault cannot be added: the ranks of run {living} live and go on as they are")
        perform(place, options, dashboard=dashboard, json=json, living=living)
        return
    with checking_input("--fault"):
        specs = [] if no_faults or (resume and not fault) else fault or default_faults(options)
        parsed = parse_all(specs, options.first_plan(), iterations=options.iterations)
    perform(place, msgspec.structs.replace(options, faults=parsed), dashboard=dashboard, json=json, mode=rights_of_new(shared))


def resumed_options(place: Store, run: str, asked: dict[str, Any], changed: list[str]) -> tuple[RunOptions, str | None]:
    """The options of the run that goes on with `run`, `changed` to what is asked, and `run` where its own ranks wait to go on;
    refuses when it cannot."""
    from unskew.collector.files.checkpoints import damaged
    from unskew.collector.read.reader import open_store
    from unskew.collector.write.commands import controller_alive
    from unskew.runtime.control.resume import resumed
    from unskew.runtime.control.takeover import living

    known_run(place, run)
    with checking_input():
        place.enter()  # before what it holds is read to go on with
    if controller_alive(place, run):
        refuse(f"run {run} is being trained: end it first, then resume it")
    if asked["verify"]:
        refuse("--verify and --resume contradict each other: losses are compared with those of a whole run")
    with checking_input(), open_store(place) as reader:
        if (options := living(place, reader, run)) is None:
            warn([f"the checkpoint in {folder} is damaged and passed over" for folder in damaged(place, run)])
            return resumed(place, reader, run, asked, changed), None
        if changed:
            refuse(f"--{changed[0].replace('_', '-')} cannot be changed: the ranks of run {run} live and go on as they are")
        return msgspec.structs.replace(options, store=str(place.root)), run


def default_faults(options: RunOptions) -> list[str]:
    """One rank slow from a sixth of the run on, not before the predictor knows healthy iterations, and, where a replica can
    stand in, another one killed at half of it. A run that is over by then is left alone."""
    from unskew.analytics.predictor.retraining import RetrainingOptions

    slow_at, kill_at = max(RetrainingOptions().warm_up + 1, options.iterations // 6), options.iterations // 2
    slow = f"slow:rank={options.ranks * 3 // 8},factor=1.8,at={slow_at}"
    kill = f"kill:rank={options.ranks * 6 // 8},at={kill_at}"
    return [slow] * (slow_at < options.iterations) + [kill] * (options.dp > 1)


def perform(
    place: Store,
    options: RunOptions,
    *,
    dashboard: bool,
    json: Path | None,
    mode: int | None = None,
    living: str | None = None,
) -> None:
    """Run, show, sum up; in a terminal the dashboard then stays up until Ctrl-C."""
    from unskew.collector.alerts.acceptance import waits
    from unskew.collector.files.checkpoints import checkpoints
    from unskew.collector.locks import hold
    from unskew.collector.paths import StoreError
    from unskew.dashboard_process import DashboardError, DashboardProcess
    from unskew.terminal.console import SafeConsole
    from unskew.terminal.live import Screen
    from unskew.terminal.summary import summary_view

    with checking_input():
        place.enter(mode=mode)
    warn([sentence] if (sentence := waits(place)) else [])
    as_ctrl_c()
    console = SafeConsole()
    facts = [("store", str(place.root))]
    with ExitStack() as stack:
        begun = hold(starting(place), wait_s=0.0)  # None: another run is about to start here, too

        def taken(entry: Entry) -> None:
            if begun is not None:
                begun.release()
            screen.feed(entry)

        try:
            served = stack.enter_context(DashboardProcess(place)) if dashboard else None
            # Here, because torch takes as long to load as the dashboard does to answer.
            from unskew.runtime.control import launch

            if served is not None:
                try:
                    facts.append(("dashboard", served.ready()))
                except DashboardError as error:  # no reason not to train
                    facts.append(("dashboard", f"none, {error}"))
                    served = None
            with Screen(console, facts) as screen:
                summary = _diagnosed(place, launch.run(options, on_event=taken, on_tick=screen.tick, living=living))
        except KeyboardInterrupt:
            fail(f"stopped; what was logged until then is in {place.root}")
        except OptionsError as error:
            refuse(str(error))
        except (StoreError, DashboardError) as error:
            fail(str(error))
        console.print(summary_view(summary))
        write_json(json, summary)
        if summary.status != "done":
            ended = "failed" if summary.status == "failed" else f"is {summary.status}"
            saved = checkpoints(place, summary.run_id) if summary.status == "failed" else []
            again = [
                f"; `unskew run --resume {summary.run_id}` goes on after {one.index.iterations} iterations" for one in saved
            ]
            fail(f"the run {ended}: {summary.reason}{''.join(again[-1:])}")
        if served is not None and console.is_terminal:
            with suppress(KeyboardInterrupt):
                console.print(f"The dashboard stays at {facts[-1][1]} until Ctrl-C.")
                signal.pause()


def _diagnosed(place: Store, summary: Summary) -> Summary:
    """With the outcome of its diagnosis, which every screen says from now on: one word for a run that is over."""
    outcome = judged_at_its_end(place, summary.run_id)
    return summary if outcome is None else msgspec.structs.replace(summary, outcome=outcome)
