"""`unskew retrain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from unskew.commands.common import JsonOption, StoreOption, checking_input, fail, known_run, locate, refuse, warn, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from unskew.analytics.predictor.refit import RefitReport
    from unskew.analytics.predictor.retraining import PredictorBacktest

STREAM = "analysis/retrain"


def retrain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Which run.", show_default=False)],
    share: Annotated[
        float, typer.Option("--share", help="The part of the iterations that is fitted; the rest tests it.", show_default="2/3")
    ] = 2 / 3,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Fit a run's predictor anew from its log; it replaces the old one where it predicts later iterations better."""
    import msgspec

    from unskew.analytics.core.cost import CostModel
    from unskew.analytics.diagnosis.attached import follow_attached
    from unskew.analytics.diagnosis.failslow import follow_run
    from unskew.analytics.predictor.refit import retrain as decide
    from unskew.analytics.predictor.retraining import fitted_event
    from unskew.collector.paths import StoreError
    from unskew.collector.read.reader import open_store
    from unskew.collector.write.control_stream import ControlStream
    from unskew.edge.load_run import load_run

    if not 0.2 <= share <= 0.9:
        refuse(f"--share {share:g}: allowed are 0.2 to 0.9 of the iterations")
    place = locate(store)
    known_run(place, run)
    with checking_input(), open_store(place) as reader:
        warn(reader.problems)
        log = load_run(reader, run)
        known = reader.sql("select predictor, model from predictors where run = ? order by predictor", [run]).to_dicts()
    if not log.released:
        refuse(f"run {run} has no chunk times with micro-batch lengths, which a predictor is fitted on")
    before = msgspec.convert(msgspec.json.decode(known[-1]["model"]), CostModel) if known else None
    with checking_input():
        followed = follow_attached(log) if log.attached else follow_run(log)
        found = decide(followed.seen, before, share, log.classes)
    number = (known[-1]["predictor"] if known else 0) + 1
    errors = {"chunks, later": round(100 * found.new.chunks, 3), "iteration, later": round(100 * found.new.iterations, 3)}
    if found.old is not None:
        errors |= {"chunks, later, before": round(100 * found.old.chunks, 3),
                   "iteration, later, before": round(100 * found.old.iterations, 3)}  # fmt: skip
    fitted = msgspec.structs.replace(found.fitted, error_percent={**found.fitted.error_percent, **errors})
    if found.better:
        try:
            stream = ControlStream(place, run, STREAM, "retrain")
            event = fitted_event(fitted, number=number, watermark=found.fitted_on[1], trigger="by hand")
            stream.add(event)
            stream.close()
        except (StoreError, OSError) as error:
            fail(f"the new predictor was not written: {error}")
    write_json(
        json,
        {
            "run_id": run, "replaced": found.better, "predictor": number if found.better else number - 1,
            "fitted_on": found.fitted_on, "tested_on": found.tested_on, "error_percent": fitted.error_percent,
            "coverage": found.coverage, "unidentified": found.fitted.unidentified, "left_out": found.fitted.left_out,
            "model": found.fitted.model,
        },
    )  # fmt: skip
    _show(run, found)
    if not found.better:
        print(f"predictor {number - 1} stays: the new one is no better")
    elif known:
        print(f"predictor {number} replaces predictor {number - 1}")
    else:
        print(f"predictor {number} is the run's first")


def _show(run: str, found: RefitReport) -> None:
    from unskew.terminal.console import SafeConsole

    tested = f"tested on {found.tested_on[0]} to {found.tested_on[1]}"
    print(f"run {run}: fitted on iterations {found.fitted_on[0]} to {found.fitted_on[1]}, {tested}")
    SafeConsole().print(_errors(found.new, found.old))
    if found.coverage:
        kinds = ", ".join(f"{100 * part:.0f} % of {kind}" for kind, part in found.coverage.items())
        print(f"within the 90 % prediction intervals: {kinds}")
    for kind, terms in found.fitted.unidentified.items():
        if terms:
            print(f"{kind}: no telling from these iterations what is due to {' and '.join(terms)} alone")


def _errors(new: PredictorBacktest, old: PredictorBacktest | None) -> Table:
    """How far the prediction of later iterations was off, with the predictor of before and with the new one."""
    from rich.table import Table

    grid = Table("median error", header_style="bold")
    for name in ("before", "new") if old is not None else ("new",):
        grid.add_column(name, justify="right")
    for name in ("chunks", "iterations"):
        fits = (old, new) if old is not None else (new,)
        grid.add_row(f"time of {name}", *(f"{100 * getattr(fit, name):.2f} %" for fit in fits))
    return grid
