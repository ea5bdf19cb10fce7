"""The `unskew` command: which commands there are. Each lives in unskew/commands/."""

from __future__ import annotations

from typing import Annotated

import typer

import unskew
from unskew.commands.afterwards import backtest, diagnose, replay, retrain, whatif
from unskew.commands.common import Commands
from unskew.commands.log import alerts, export, import_, sql, store
from unskew.commands.research import bench, simulate, study
from unskew.commands.train import dashboard, decide, probe, rank, run, watch

TRAIN, AFTERWARDS, LOG, RESEARCH = "A run, live", "A run, afterwards", "The log", "Research"

app = typer.Typer(
    name="unskew",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        print(f"unskew {unskew.__version__}")
        raise typer.Exit


@app.callback()
def unskew_command(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps large hybrid-parallel training fast when its hardware is not."""


app.command(rich_help_panel=TRAIN)(run.run)
app.command(rich_help_panel=TRAIN, cls=watch.WatchCommand)(watch.watch)
app.command(rich_help_panel=TRAIN)(decide.approve)
app.command(rich_help_panel=TRAIN)(decide.reject)
app.command(rich_help_panel=TRAIN)(decide.mode)
app.command(rich_help_panel=TRAIN)(probe.probe)
app.add_typer(rank.app, rich_help_panel=TRAIN)
app.command(rich_help_panel=AFTERWARDS)(diagnose.diagnose)
app.command(rich_help_panel=AFTERWARDS)(whatif.whatif)
app.command(rich_help_panel=LOG)(sql.sql)
app.command("import", rich_help_panel=LOG)(import_.import_)
app.command(rich_help_panel=LOG)(export.export)
app.command(rich_help_panel=AFTERWARDS)(replay.replay)
app.command(rich_help_panel=AFTERWARDS)(backtest.backtest)
app.command(rich_help_panel=AFTERWARDS)(retrain.retrain)
app.command(rich_help_panel=RESEARCH)(simulate.simulate)
app.command(rich_help_panel=RESEARCH)(study.study)
app.command(rich_help_panel=LOG)(dashboard.dashboard)
app.command(rich_help_panel=RESEARCH)(bench.bench)
app.add_typer(store.app, rich_help_panel=LOG)
app.add_typer(alerts.app, rich_help_panel=LOG)
