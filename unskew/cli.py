"""The `unskew` command: which commands there are. Each lives in unskew/commands/."""

from __future__ import annotations

import typer

from unskew.commands import (
    alerts,
    backtest,
    bench,
    dashboard,
    decide,
    diagnose,
    export,
    import_,
    replay,
    retrain,
    run,
    simulate,
    sql,
    store,
    study,
    watch,
    whatif,
)
from unskew.commands.common import Commands

app = typer.Typer(
    name="unskew",
    cls=Commands,
    help="Keeps large hybrid-parallel training fast when its hardware is not.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run.run)
app.command()(watch.watch)
app.command()(decide.approve)
app.command()(decide.reject)
app.command()(decide.mode)
app.command()(diagnose.diagnose)
app.command()(whatif.whatif)
app.command()(sql.sql)
app.command("import")(import_.import_)
app.command()(export.export)
app.command()(replay.replay)
app.command()(backtest.backtest)
app.command()(retrain.retrain)
app.command()(simulate.simulate)
app.command()(study.study)
app.command()(dashboard.dashboard)
app.command()(bench.bench)
app.add_typer(store.app)
app.add_typer(alerts.app)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 the work failed, 2 bad usage or input."""
    app()
