"""`unskew alerts`: check, accept, show, run."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.commands.common import (
    Commands,
    JsonOption,
    StoreOption,
    checking_input,
    fail,
    locate,
    refuse,
    there,
    warn,
    write_json,
)
from unskew.terminal.safe_text import harmless

if TYPE_CHECKING:
    from unskew.collector.alerts.evaluation import AlertTransition
    from unskew.collector.paths import Store

app = typer.Typer(
    name="alerts", cls=Commands, help="Tell a command or a webhook what happens in the runs of a store.", no_args_is_help=True
)
RulesOption = Annotated[
    Path | None, typer.Option("--rules", metavar="FILE", help="The rules.", show_default="alerts.toml in the store")
]
SHOWN = 20


@app.command()
def check(rules: RulesOption = None, json: JsonOption = None, store: StoreOption = None) -> None:
    """Read the rules, ask each once, and show what holds now; nothing is delivered and nothing is logged."""
    from unskew.collector.alerts.acceptance import waits
    from unskew.collector.alerts.evaluation import RuleReader
    from unskew.collector.alerts.rules import load_rules

    place = there(locate(store))
    if rules is None and not _file(place, None).exists():
        print(f"there is no {_file(place, None)}: nobody is told of anything; docs/guide/alerts.md shows one")
        write_json(json, [])
        return
    with checking_input():
        known = load_rules(_file(place, rules))
    if rules is None:
        warn([sentence] if (sentence := waits(place)) else [])
    with checking_input(), closing(RuleReader(place)) as reader:
        conditions = [reader.ask(rule, time.time_ns() // 1000) for rule in known]
    answer: list[dict[str, Any]] = []
    for rule, condition in zip(known, conditions, strict=True):
        holds = [{"run": run, "subject": subject, "text": text} for (run, subject), text in condition.holds.items()]
        answer.append({"rule": rule.name, "target": rule.target, "error": condition.error or None, "holds": holds})
        state = f"cannot be asked: {condition.error}" if condition.error else f"holds {len(holds)} times"
        print(harmless(f"{rule.name} -> {rule.target}: {state}"))
        for one in holds[:SHOWN]:
            print(harmless(f"  {one['run']}: {one['text']}"))
    if not known:
        print(f"{_file(place, rules)} has no rules: nothing can open")
    write_json(json, answer)
    if any(condition.error for condition in conditions):
        refuse("a rule cannot be asked, see above; unskew sql tries a query out")


@app.command()
def accept(store: StoreOption = None) -> None:
    """Let the rules of the store's alerts.toml, which are shown, run whatever they name, until the file changes."""
    from unskew.collector.alerts.acceptance import accept as add
    from unskew.collector.alerts.acceptance import accepted_file
    from unskew.collector.alerts.rules import load_rules, text_of

    file = _file(there(locate(store)), None)
    with checking_input():
        known = load_rules(file, text := text_of(file))  # what is shown is accepted, and nothing that came meanwhile
    for rule in known:
        print(harmless(f"{rule.name} -> {rule.target}", sys.maxsize))
    try:
        add(file, text)
    except OSError as error:
        fail(f"{accepted_file()} cannot be written: {error.strerror or error}")
    print(f"{file} is accepted as it is now")


@app.command()
def show(json: JsonOption = None, store: StoreOption = None) -> None:
    """Show the newest alerts of the store, open ones first, and the deliveries that failed."""
    from unskew.collector.alerts.acceptance import waits
    from unskew.collector.read.reader import open_store

    place = there(locate(store))
    warn([sentence] if (sentence := waits(place)) else [])
    with checking_input(), open_store(place) as reader:
        alerts = reader.sql("select * from alerts order by closed_us is not null, opened_us desc limit ?", [SHOWN]).to_dicts()
        failed = reader.sql("select * from alert_deliveries where not ok order by at_us desc limit ?", [SHOWN]).to_dicts()
    for one in alerts:
        state = "open" if one["closed_us"] is None else f"closed ({one['closed_reason']})"
        print(harmless(f"{_clock(one['opened_us'])} {one['run']} {one['rule']} {one['subject']}: {one['text']} [{state}]"))
    for one in failed:
        missed = f"{one['run']}: {one['phase']} not delivered to {one['target']}: {one['detail']}"
        print(harmless(f"{_clock(one['at_us'])} {missed}"))
    if not alerts:
        print(f"no alert was opened in {place.root}")
    write_json(json, {"alerts": alerts, "failed_deliveries": failed})


@app.command()
def run(
    rules: RulesOption = None,
    once: Annotated[bool, typer.Option("--once", help="Evaluate once, deliver, and end.")] = False,
    period_s: Annotated[
        float, typer.Option(min=0.1, max=86_400.0, metavar="SECONDS", help="How often the rules are asked.")
    ] = 2.0,
    store: StoreOption = None,
) -> None:
    """Evaluate the rules until Ctrl-C. The collector does so by itself for a store that has an alerts.toml."""
    from unskew.collector.alerts.acceptance import load_accepted
    from unskew.collector.alerts.process import serve
    from unskew.collector.alerts.rules import load_rules
    from unskew.collector.paths import StoreError

    place = there(locate(store))
    file, load = _file(place, rules), load_accepted if rules is None else load_rules
    with checking_input():
        load(file)
        place.enter()
    try:
        serve(place, file, over=lambda: once, load=load, show=_print, period_s=period_s)
    except StoreError as error:
        fail(str(error))


def _file(store: Store, rules: Path | None) -> Path:
    from unskew.collector.alerts.rules import rules_file

    return rules or rules_file(store)


def _print(change: AlertTransition) -> None:
    run_, rule, subject = change.key
    print(harmless(f"{'closed' if change.closes else 'opened'}: {run_} {rule} {subject}: {change.text}"), flush=True)


def _clock(at_us: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_us / 1e6))
