"""`unskew watch`: a run as it goes, or a command that trains, started and watched."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from unskew.collector.events import Mode
from unskew.commands.common import (
    JsonOption,
    StoreOption,
    checking_input,
    fail,
    known_run,
    locate,
    refuse,
    starting,
    store_runs,
    the_run,
    warn,
    writable,
    write_json,
)

if TYPE_CHECKING:
    from unskew.collector.alerts.rules import Rule
    from unskew.collector.events import RunFinished
    from unskew.collector.paths import Store
    from unskew.runtime.attach.acting import ActOptions

POLL_S = 0.5
BEGINS_WITHIN_S = 2.0
"""So long `unskew run` may take until its store is there: it loads its packages first."""
COMMAND = "unskew.command"


class WatchCommand(TyperCommand):
    """What stands behind `--` is a command of the user's, and no option of ours is looked for in it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def watch(
    ctx: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN | -- CMD...]", help="Which run, or what to start.", show_default="the newest run"),
    ] = None,
    store: StoreOption = None,
    json: JsonOption = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a report of the run, one file, at its end.",
            show_default=False,
            callback=writable,
        ),
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="Whether advice is only shown, asked for, or applied.", show_default="observe")
    ] = None,
    replace: Annotated[
        str | None,
        typer.Option("--replace", metavar="CMD|URL", help="Who is handed a slow device, as JSON.", show_default=False),
    ] = None,
) -> None:
    """Show a run as it goes, until it ends or Ctrl-C; or start a training of your own and say who slows it, and why."""
    command: list[str] | None = ctx.meta.get(COMMAND)
    if command is None:
        for option, value in (("--json", json), ("--mode", mode), ("--replace", replace)):
            if value is not None:
                refuse(f"{option} is for a command that is started: unskew watch {option} ... -- CMD...")
        place = locate(store)
        name = known_run(place, run) if run is not None else last_run(place)
        from unskew.collector.write.commands import controller_alive
        from unskew.runtime.attach.outside.command import unwatched, watch_ranks

        if not controller_alive(place, name) and unwatched(place, name):  # ranks that somebody else has started
            watch_training(place, name, partial(watch_ranks, place, name), json=None, html=html)
            return
        follow_run(place, name)
        write_report(place, name, html)
    elif not any(command[:1]) or run is not None:
        refuse("behind -- a command is needed, and no run before it: unskew watch -- torchrun --nproc-per-node 2 train.py")
    else:
        from unskew.runtime.attach.acting import ActOptions

        act = ActOptions(mode=mode or "observe", replace=None if replace is None else handed_to(replace))
        raise typer.Exit(start_training(store, command, act, json=json, html=html))


def handed_to(text: str) -> Rule:
    """What a slow device is handed to: a command of the user's own, or an address."""
    from unskew.collector.alerts.rules import Rule, is_address

    if text.startswith(("http://", "https://")):
        if not is_address(text):
            refuse("--replace: that is not an address like http://host:port/path (ASCII, without user:password@)")
        return Rule(webhook=text)
    with checking_input("--replace"):
        words = tuple(shlex.split(text))
    if not words or shutil.which(words[0]) is None:
        refuse(f"--replace: there is no command {words[0] if words else text!r} here")
    return Rule(command=words)


def write_report(place: Store, run: str, path: Path | None) -> None:
    """The run as one HTML file, where one is asked for."""
    from unskew.collector.read.reader import open_store
    from unskew.collector.write.commands import controller_alive
    from unskew.report.page import report

    if path is None:
        return
    with open_store(place) as reader:
        page = report(reader, run, controlled=controller_alive(place, run))
    try:
        path.write_text(page)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror or error}")


def last_run(place: Store) -> str:
    """The run that goes on, or is about to, else the newest; one that was typed a moment ago is waited for."""
    from unskew.collector.locks import is_held
    from unskew.collector.write.commands import living_runs

    deadline = time.monotonic() + BEGINS_WITHIN_S
    while not (living := living_runs(place)):
        # One that has just begun may have nothing in the log yet.
        if not is_held(starting(place)) and (store_runs(place) or time.monotonic() >= deadline):
            return the_run(place, None)
        time.sleep(POLL_S)
    return living[-1]


def follow_run(place: Store, name: str) -> None:
    """The live view of a run that somebody else has started."""
    from unskew.collector.write.commands import controller_alive
    from unskew.terminal.console import SafeConsole
    from unskew.terminal.follow import LogFollower
    from unskew.terminal.live import Screen

    with (
        LogFollower(place, name) as follow,
        Screen(SafeConsole(), [("store", str(place.root))]) as screen,
        suppress(KeyboardInterrupt),
    ):
        alive = True
        while alive:
            alive = controller_alive(place, name)
            screen.controlled(alive)
            for entry in follow.poll():
                screen.feed(entry)
            screen.heard(follow.age_s)
            screen.tick()
            time.sleep(POLL_S if alive else 0.0)
    if not alive and screen.state.run.started is None and of_somebody(place, name):
        warn([f"run {name} was only recorded: nobody can judge it any more, as a collector has sealed what its ranks wrote"])
    elif not alive and screen.state.run.finished is None:
        warn([f"the controller of run {name} is gone: the run ended without saying so"])
    warn(follow.problems)


def of_somebody(place: Store, name: str) -> bool:
    """Whether its ranks are of a training that is not ours."""
    from unskew.collector.read.reader import open_store

    with open_store(place) as reader:
        return bool(reader.sql("select 1 from events where run = ? and type like 'rank_attached%' limit 1", [name]).rows())


def start_training(store: str | None, command: list[str], act: ActOptions, *, json: Path | None, html: Path | None) -> int:
    """Start and watch; the command's exit code. The terminal is the command's: ours are lines on stderr among its own.

    Whatever stands in the way of watching, the command runs: a job that has waited for its machines must not end for that."""
    from unskew.collector.paths import Store
    from unskew.runtime.attach.outside.command import (
        NotStartedError,
        NotWatchedError,
        claim,
        environment,
        in_words,
        watch_command,
    )

    if os.environ.get("UNSKEW") == "0":
        run_alone(command, "UNSKEW=0")
    asked = os.environ.get("UNSKEW_RUN") or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        place = Store.locate(store)
        place.enter()
        run, lock = claim(place, asked)
    except Exception as error:  # a name that is none, a manifest that nobody can read, a folder without locks
        run_alone(command, in_words(error))
    if run != asked:
        warn([f"UNSKEW_RUN: there is a run {asked} already in {place.root}; this one is {run}"])
    if lock is None:
        run_alone(command, f"run {run} has its watcher, who sees these ranks too", environment(place, run, os.environ))

    code: int | None = None

    def watching(**hooks: Any) -> tuple[int, RunFinished | None]:
        nonlocal code
        code, end = watch_command(place, run, command, act=act, **hooks)
        return code, end

    try:
        with lock:
            return watch_training(place, run, watching, json=json, html=html)
    except NotWatchedError as error:
        run_alone(command, str(error))
    except NotStartedError as error:
        fail(str(error))
    except Exception as error:
        if code is None:  # nothing was started yet
            run_alone(command, in_words(error))
        if not isinstance(error, typer.Exit):  # which has said why
            warn([f"run {run} is not summed up: {in_words(error)}"])
        return code


def run_alone(command: list[str], why: str, environment: Mapping[str, str] = os.environ) -> NoReturn:
    """The command in our place, unwatched by us."""
    from unskew.runtime.attach.outside.command import cannot_start

    warn([f"nothing is watched here, the command runs all the same: {why}"])
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        fail(cannot_start(command, error))


def watch_training(
    place: Store, run: str, watching: Callable[..., tuple[int, RunFinished | None]], *, json: Path | None, html: Path | None
) -> int:
    """Show what is found while `watching` goes on, and sum it up; the code that it ends with."""
    from unskew.collector.read.reader import open_store
    from unskew.runtime.attach.outside.disk import unseen
    from unskew.runtime.control.summary import SummaryBuilder
    from unskew.terminal.console import SafeConsole
    from unskew.terminal.live import Screen
    from unskew.terminal.live_view import render
    from unskew.terminal.time_by_phase import PhaseTimes, phase_table

    console, facts = SafeConsole(stderr=True), [("store", str(place.root)), ("run", run)]
    builder, phases = SummaryBuilder(), PhaseTimes()
    problems: list[str] = []
    with Screen(SafeConsole(stderr=True, force_terminal=False), facts) as screen:

        def take(entry: Any) -> None:
            builder.take(entry)
            phases.take(entry.event)
            screen.feed(entry)

        def stops(why: str) -> None:
            problems.append(why)
            warn([f"the training goes on and is not watched any more, nor summed up at its end: {why}"])

        code, end = watching(on_entry=take, on_tick=screen.tick, on_problem=stops)
    if problems:
        return code
    if end is None:
        warn([unseen(place, run)])
        return code
    with suppress(OSError):  # a terminal that was closed takes no summary, the files of it are written all the same
        console.print(render(screen.state, facts, console.width, 60))
        console.print(phase_table(phases))
    with open_store(place) as reader:
        stored = int(reader.sql("select count(*) as n from events where run = ?", [run])["n"][0])
    device = screen.state.run.started.device if screen.state.run.started else ""
    write_json(json, builder.summary(run, device, stored, None, end))
    write_report(place, run, html)
    return code
