"""`unskew backtest`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.commands.common import JsonOption, StoreOption, checking_input, known_run, locate, refuse, warn, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from unskew.analytics.replay.backtest import DetectorBacktest, DetectorTally, DetectorVerdict
    from unskew.analytics.replay.method import Method
    from unskew.analytics.replay.recorded_run import RecordedRun


def backtest(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Which run.", show_default=False)],
    detector: Annotated[
        str,
        typer.Option(
            "--detector",
            metavar="CONFIG",
            help="A TOML file of thresholds (docs/guide/replay.md), or one of unskew, resihp, greyhound, nvrx, traceml.",
            show_default=False,
        ),
    ],
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Run another detector over the log of a run and show what would have changed."""
    from unskew.analytics.diagnosis.imported import beside_diagnosis
    from unskew.analytics.replay.backtest import backtest as compare
    from unskew.collector.read.reader import open_store
    from unskew.edge.load_run import is_imported, load_run
    from unskew.edge.recorded_run import recorded_run
    from unskew.terminal.console import SafeConsole

    place = locate(store)
    known_run(place, run)
    with checking_input(), open_store(place) as reader:
        warn(reader.problems)
        ours, settings = "diagnose", dict[str, Any]()
        if is_imported(reader, run):
            result = beside_diagnosis(load_run(reader, run), without_lengths(detector, run))
        else:
            ours, recorded = "live", recorded_run(reader, run)
            method, settings = configured(detector, recorded)
            result = compare(recorded, method)
    write_json(json, facts(result, detector, settings))
    print(f"run {run}, {result.iterations} iterations: {'the live detector' if ours == 'live' else ours} beside {detector}")
    for key, value in settings.items():
        print(f"  {key} = {value}")
    if result.pairs:
        SafeConsole().print(table(result, detector, ours))
    else:
        print("neither named anybody slow")
    for name, tally in ((ours, result.live), (detector, result.other)):
        print(f"{name}: {score(tally)}")
    if result.alarms:
        print(f"alarms of {detector}: {len(result.alarms)}, the first at iteration {result.alarms[0][0]}")


def configured(detector: str, recorded: RecordedRun) -> tuple[Method, dict[str, Any]]:
    """The method that CONFIG names, and the thresholds that a file sets. Refuses what is neither."""
    from unskew.analytics.lab.baselines.ours import UnskewDetector
    from unskew.analytics.lab.baselines.registry import METHODS

    if detector in METHODS:
        return METHODS[detector](), {}
    path = Path(detector)
    if not path.is_file():
        refuse(f"--detector {detector} is neither a TOML file nor a method; methods: {', '.join(METHODS)}")
    try:
        settings = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        refuse(f"--detector {detector} is not TOML: {error}")
    return UnskewDetector(thresholds(detector, recorded, settings)), settings


def without_lengths(detector: str, run: str) -> Method:
    """A method that needs no predictor, for an imported run. Refuses the others."""
    from unskew.analytics.lab.baselines.registry import METHODS, NEED_LENGTHS

    known = [name for name in METHODS if name not in NEED_LENGTHS]
    if detector not in known:
        refuse(
            f"--detector {detector}: run {run} was imported without the lengths of its micro-batches, by which that predicts; "
            f"methods without a prediction: {', '.join(known)}"
        )
    return METHODS[detector]()


def thresholds(detector: str, recorded: RecordedRun, settings: dict[str, Any]) -> Any:
    """The run's own thresholds with `settings` instead of some."""
    import msgspec

    from unskew.analytics.detector.options import DetectorOptions
    from unskew.analytics.replay.watched import options_of
    from unskew.collector.decoding import complaint

    known = {field.name for field in msgspec.structs.fields(DetectorOptions)} - {"method"}
    unknown = sorted(settings.keys() - known)
    if unknown:
        refuse(f"--detector {detector}: {unknown[0]} is not a threshold; known are {', '.join(sorted(known))}")
    own = msgspec.structs.replace(options_of(recorded), method="unskew")  # whoever decided in the run, these are ours
    try:
        return msgspec.convert({**msgspec.to_builtins(own), **settings}, DetectorOptions)
    except (msgspec.ValidationError, ValueError) as error:
        refuse(f"--detector {detector}: {complaint(error)}")


def table(result: DetectorBacktest, name: str, ours: str = "live") -> Table:
    """A row per verdict of either; a diagnosis looks back from the end, so it is never earlier or later."""
    from rich.table import Table

    grid = Table(header_style="bold")
    for title in ("cause", "culprit", ours, name, "change"):
        grid.add_column(title)
    for pair in result.pairs:
        change = f"{pair.change} by {pair.iterations}" if pair.iterations else pair.change
        change = "same" if ours != "live" and pair.live and pair.other else change
        grid.add_row(pair.cause, pair.culprits, _cell(pair.live), _cell(pair.other), change)
    return grid


def _cell(verdict: DetectorVerdict | None) -> str:
    if verdict is None:
        return "–"
    speed = ", ".join(f"{kind} {value:.2f}" for kind, value in sorted(verdict.speed.items()))
    truth = {True: ", right", False: ", wrong", None: ""}[verdict.correct]
    return f"at {verdict.at_iteration}, since {verdict.since_iteration}" + (f", speed {speed}" if speed else "") + truth


def score(tally: DetectorTally) -> str:
    """A detector's tally in a sentence."""
    found = f"{tally.verdicts} verdict{'s' * (tally.verdicts != 1)} on slowness"
    if not tally.injected:
        return f"{found}, {tally.false} of them false; no slowdown was injected"
    delay = "" if tally.delay_iterations is None else f", {tally.delay_iterations:g} iterations after it began (median)"
    return f"{found}, {tally.false} of them false; {tally.found} of {tally.injected} injected slowdowns found{delay}"


def facts(result: DetectorBacktest, detector: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the screen shows, as plain data."""
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(result)
    changes = [pair.change for pair in result.pairs]
    return {
        "run_id": data.pop("run"),
        "detector": detector,
        "settings": settings,
        **data,
        "changes": {change: changes.count(change) for change in ("same", "earlier", "later", "fewer", "more")},
    }
