"""`unskew approve`, `reject` and `mode`: what people decide for a run's controller, and what it answered."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from unskew.collector.events import CommandRefused, Event, Mode, ModeChanged, PlanApproved, PlanRejected, Probed, RankAdded
from unskew.commands.common import StoreOption, checking_input, fail, known_run, locate, refuse, there
from unskew.terminal.safe_text import harmless

if TYPE_CHECKING:
    from unskew.collector.command import Command
    from unskew.collector.paths import Store

ANSWER_WITHIN_S = 15.0

Proposal = Annotated[str, typer.Argument(metavar="ID", help="The proposal, as `unskew watch` and the dashboard show it.")]
By = Annotated[str, typer.Option("--by", metavar="NAME", help="Who decides; recorded in the log.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded in the log.")]
OptionalReason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded in the log.", show_default=False)]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="Which run.", show_default="the one that is running")
]


def approve(proposal: Proposal, by: By, reason: Reason, run: RunOption = None, store: StoreOption = None) -> None:
    """Let a proposed change of plan take effect."""
    from unskew.collector.command import Command

    place = locate(store)
    decide(place, Command(kind="approve", run=living_run(place, run), target=proposal, by=by, reason=reason))


def reject(proposal: Proposal, by: By, reason: Reason, run: RunOption = None, store: StoreOption = None) -> None:
    """Turn down a proposed change of plan."""
    from unskew.collector.command import Command

    place = locate(store)
    decide(place, Command(kind="reject", run=living_run(place, run), target=proposal, by=by, reason=reason))


def mode(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Which run.")],
    mode: Annotated[Mode, typer.Argument(help="Whether optional changes of plan are left, asked for, or applied.")],
    by: By,
    reason: OptionalReason = "",
    store: StoreOption = None,
) -> None:
    """Choose who decides on optional changes of plan: nobody (observe), people (approve) or the controller (auto)."""
    from unskew.collector.command import Command

    place = locate(store)
    decide(place, Command(kind="mode", run=known_run(place, run), target=mode, by=by, reason=reason))


def living_run(store: Store, run: str | None) -> str:
    """`run`, or the only one with a living controller; refuses when there is none or more than one."""
    from unskew.collector.write.commands import living_runs

    if run is not None:
        return known_run(store, run)
    living = living_runs(there(store))
    if not living:
        refuse(f"no run is alive in {store.root}: nobody would act on this")
    if len(living) > 1:
        refuse(f"{len(living)} runs are alive in {store.root}, name one with --run: {', '.join(living)}")
    return living[0]


def decide(store: Store, command: Command, *, within_s: float = ANSWER_WITHIN_S) -> None:
    """Send the command and wait for what the controller makes of it; prints that, exit 1 when it was refused."""
    from unskew.collector.files.tail import Tail
    from unskew.collector.write.commands import controller_alive, send
    from unskew.terminal.sentences import sentence_of

    tail = Tail.of_decisions(store, command.run)
    if command.kind in ("approve", "reject") and not command.reason.strip():
        refuse("--reason says nothing: the log keeps why somebody decided")
    with checking_input():
        send(store, command.run, command)
    deadline, gone = time.monotonic() + within_s, False
    while not gone and time.monotonic() < deadline:
        gone = not controller_alive(store, command.run)  # first: its last words come before it goes
        for entry in tail.poll():
            if answers(entry.event, command) and (sentence := sentence_of(entry.event)):
                if isinstance(entry.event, CommandRefused):
                    fail(f"refused: {sentence.text}")
                print(harmless(sentence.text))
                return
        time.sleep(0.1)
    if gone:
        fail(f"the controller of {command.run} ended and had not answered")
    fail(f"the controller of {command.run} has not answered within {within_s:g} s; the command waits in its inbox")


def answers(event: Event | None, command: Command) -> bool:
    """Whether the event is what the controller made of the command."""
    match event:
        case PlanApproved() | PlanRejected():
            return event.proposal == command.target and isinstance(event, PlanApproved) == (command.kind == "approve")
        case ModeChanged():
            return command.kind == "mode" and event.mode == command.target
        case CommandRefused() | RankAdded() if event.command_id:  # several may ask for the same at once
            return event.command_id == command.id
        case CommandRefused():
            asked = f"{command.kind} {command.target}".strip()
            return event.by == command.by and event.command in (command.id, command.target, asked)
        case Probed():
            return command.kind == "probe" and command.target in map(str, event.ranks)
    return False
