"""What every command shares: --store, --json, and how bad input and failed work end (exit 2 and 1, one sentence on stderr)."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import msgspec
import typer
from typer.core import TyperGroup

from unskew.terminal.safe_text import harmless

if TYPE_CHECKING:
    from types import FrameType

    from unskew.collector.paths import Store

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="The folder that holds runs and their logs.",
        show_default="$UNSKEW_STORE, else data/store",
    ),
]
SharedOption = Annotated[
    bool, typer.Option("--shared", help="Make a new store one for its folder's group, instead of yours alone.")
]
WARNINGS = 3


def refuse(sentence: str) -> NoReturn:
    """End the command: bad usage or input."""
    print(harmless(sentence).replace("\n", "␊"), file=sys.stderr)
    raise typer.Exit(2)


def fail(sentence: str) -> NoReturn:
    """End the command: the work failed."""
    print(harmless(sentence).replace("\n", "␊"), file=sys.stderr)
    raise typer.Exit(1)


@contextmanager
def checking_input(option: str = "") -> Iterator[None]:
    """Errors about input (all are ValueError, one sentence each) become a refusal; wrap only the checks, never the work.

    `option`: whose value is checked; it is named before the sentence.
    """
    try:
        yield
    except ValueError as error:
        refuse(f"{option} {error}".lstrip())


def ctrl_c(number: int, frame: FrameType | None) -> None:
    """A signal's handler: `KeyboardInterrupt`, but while something is loaded the process ends at once, by that signal.

    An exception out of a handler may be lost there: the import system drops those of its weak references' callbacks.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        frame = frame.f_back
    raise KeyboardInterrupt


def as_ctrl_c() -> None:
    """From now on a scheduler's stop and a closed terminal end the command as Ctrl-C does; under nohup the latter does not."""
    signal.signal(signal.SIGTERM, ctrl_c)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, ctrl_c)


class Commands(TyperGroup):
    """The commands; bad usage and a store that cannot serve, noticed anywhere in one, end it as bad input does.

    A file that cannot be read or written, wherever, is named: the fault lies in it, not in the program.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            refuse(f"there is no command {ctx.command_path} {cmd_name}, allowed: {', '.join(self.list_commands(ctx))}")
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = args[: args.index("--")] if "--" in args else args
        if wrong := [word for word in ours if not _is_text(word)]:
            refuse(f"{wrong[0]} is not UTF-8, which names and paths must be")
        with checking_usage(ctx.command_path):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        from unskew.collector.paths import StoreError

        with checking_usage(ctx.command_path):
            try:
                return super().invoke(ctx)
            except StoreError as error:
                refuse(str(error))
            except BrokenPipeError:  # whoever read the answer has enough of it
                raise
            except OSError as error:
                fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:  # bytes that are none, as Python passes them on; DuckDB and Arrow take no such path
        return False
    return True


_PLAINLY = (
    ("Value error, ", ""),
    (r"[Ii]nput should be a valid integer, unable to parse string as an integer", "a whole number is needed"),
    (r"[Uu]nable to parse input string as an integer, exceeded maximum size", "a smaller whole number is needed"),
    (r"[Ii]nput should be a valid number, unable to parse string as a number", "a number is needed"),
    (r"[Ii]nput should be a finite number", "a finite number is needed"),
    (r"[Ii]nput should be (greater|less) than or equal to (\S+)", r"it must be \1 than or equal to \2"),
)
"""What the parser's own parser says -> the same to a person."""


@contextmanager
def checking_usage(command: str) -> Iterator[None]:
    """What the parser of the command line complains about becomes a refusal; `command` when the complaint names none itself."""
    # The base of its complaints is not among Typer's public names.
    usage_error = cast("type[Exception]", typer.BadParameter.__base__)
    try:
        yield
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help page of a group that was called without a command
            raise
        complaint = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        for theirs, ours in _PLAINLY:
            complaint = re.sub(theirs, ours, complaint)
        where = getattr(getattr(error, "ctx", None), "command_path", command)
        refuse(f"{where}: {complaint[:1].lower()}{complaint[1:].rstrip('.')}; {where} --help has more")


def locate(option: str | None) -> Store:
    """The store that a command works on."""
    from unskew.collector.paths import Store

    with checking_input():
        return Store.locate(option)


def rights_of_new(shared: bool) -> int | None:
    """The rights that --shared asks for; None = those that the store has, or by default gets."""
    from unskew.collector.rights import SHARED

    return SHARED if shared else None


def there(store: Store) -> Store:
    """`store`, when its folder exists; refuses otherwise: a mistyped one would answer as an empty one."""
    if not store.root.is_dir():
        refuse(f"there is no store in {store.root}")
    return store


def store_runs(store: Store) -> list[str]:
    """The names of the runs in the store, oldest first (a name begins with its date)."""
    from unskew.collector.files import manifest

    with checking_input():
        return sorted({*store.spooled_runs(), *(sealed.run for sealed in manifest.load(store).sealed)})


def newest_run(store: Store) -> str | None:
    """The run of the store that was started or imported last; None in an empty one."""
    from unskew.collector.read.reader import open_store

    with checking_input(), open_store(store) as reader:
        found = reader.sql("select run from runs order by started_us desc limit 1")["run"].to_list()
    return found[0] if found else None


def starting(store: Store) -> Path:
    """The lock of a command that is about to start a run, or at it."""
    return store.lock("starting")


def the_run(store: Store, run: str | None) -> str:
    """`run`, when the store has it, by default its newest; refuses otherwise."""
    name = newest_run(there(store)) if run is None else known_run(store, run)
    return name if name is not None else refuse(f"there is no run in {store.root}: run one or import one first")


def known_run(store: Store, run: str) -> str:
    """`run`, when the store has it; refuses otherwise, naming the newest runs."""
    runs = store_runs(there(store))
    if run not in runs:
        refuse(
            f"there is no run {run} in {store.root}; "
            + (f"its last runs: {', '.join(runs[-5:])}" if runs else "it has none yet")
        )
    return run


def warn(problems: Sequence[str]) -> None:
    """What the collector found wrong in the log, beside an answer from it: the first few, a line each on stderr."""
    for problem in problems[:WARNINGS]:
        print(f"warning: {harmless(problem)}", file=sys.stderr)
    if len(problems) > WARNINGS:
        print(f"warning: {len(problems) - WARNINGS} more problems are in the store's manifest.json", file=sys.stderr)


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """`path`, when a file can be written there, before any work is done; refuses otherwise."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse(f"{option.opts[0]} {path}: cannot create {path.parent}: {error.strerror}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            refuse(f"{option.opts[0]} {path} cannot be written: name a file in a writable folder")
    return path


def placed(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """As `writable`, in a folder that exists: none is made for a mistyped path."""
    if path is not None and not path.parent.is_dir():
        refuse(f"{option.opts[0]} {path}: there is no folder {path.parent}")
    return writable(option, path)


JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the answer as JSON to FILE.", callback=writable)
]


def write_json(path: Path | None, answer: Any) -> None:
    """`answer` (plain data or msgspec structs) to `path`, when one is given."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
