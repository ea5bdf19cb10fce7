"""No plan is left: nobody lives who holds some layer. The run waits for ranks, and goes on from its newest checkpoint, or
anew where there was none yet.

A rank counts when it lives, when mode auto would start it again, or when somebody asks for it (`unskew rank add`). With enough
of them for a pipeline a new run begins, of the replicas that there are ranks for, the largest first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from unskew.analytics.loop.controller_state import ControllerState
from unskew.collector.command import Command
from unskew.collector.events import CommandRefused, Control, Note, RankAdded
from unskew.collector.files.checkpoints import checkpoints
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import Inbox
from unskew.collector.write.control_stream import ControlStream
from unskew.runtime.control.allowed import LAYOUT_OF_DEGREES
from unskew.runtime.control.membership import AgentLost, Membership
from unskew.runtime.control.resume import resumed
from unskew.runtime.options import RunOptions

_POLL_S = 0.2


class RunError(RuntimeError):
    """The run cannot go on; the message is one sentence: what happened and, where there is one, what to do."""


class NoPlanLeft(RunError):  # noqa: N818 - an event of the run, not a defect
    """No living ranks hold all layers; `state` is what the controller knew then."""

    def __init__(self, reason: str, state: ControllerState) -> None:
        super().__init__(reason)
        self.state = state


class Waiting(msgspec.Struct, frozen=True):
    """A run of these options that waits for ranks."""

    state: ControllerState
    options: RunOptions

    @property
    def ranks(self) -> int:
        """How many there are, those that are coming among them."""
        return len(self.state.alive) + len(self.state.rejoining.coming)

    @property
    def goes_on(self) -> RunOptions | None:
        """With the replicas for which there are ranks; None = it waits."""
        return self.options.within(self.ranks)

    def asked(self, commands: Sequence[Command], respawns: int) -> tuple[Waiting, list[Control]]:
        """With what people ask for, and what mode auto starts; and what to log of it."""
        state, made = self.state, list[Control]()
        if state.queue.mode == "auto":
            made += [one for one in state.rejoining.due(state.queue.iterations, respawns) if one.rank not in state.alive]
        for one in made:
            state = state.take(one)
        for command in commands:
            answer: RankAdded | CommandRefused = CommandRefused(
                command=command.kind, by=command.by, reason="the run waits for ranks", user=command.user
            )
            if command.kind == "rank":
                site, iterations = state.adaptation.site, state.queue.iterations
                answer = state.rejoining.command(command, state.committed, iterations=iterations, most_ranks=site.most_ranks)
            state = state.take(answer)
            made.append(answer)
        return msgspec.structs.replace(self, state=state), made


def wait_for_ranks(
    stuck: NoPlanLeft,
    options: RunOptions,
    store: Store,
    run: str,
    *,
    control_log: ControlStream,
    membership: Membership,
    meanwhile: Callable[[], None],
) -> RunOptions:
    """The options of the run that goes on, once there are ranks for it.

    `meanwhile` is called some times a second: who waits shows what is logged, and hears Ctrl-C.
    """
    whole = checkpoints(store, run)
    waiting, inbox = Waiting(stuck.state, options), Inbox(store, run)
    at = whole[-1].index.iterations if whole else options.first_iteration
    needed = min(map(sum, options.stages))
    begins = f"goes on from the checkpoint after {at} iterations" if at else "begins anew, for it has no checkpoint yet"
    control_log.add(
        Note(
            text=f"{stuck}; it waits for ranks: {waiting.ranks} live, a pipeline has {needed}; then it {begins}",
            by="controller",
        )
    )
    while True:
        commands, refused = inbox.poll()
        waiting, made = waiting.asked(commands, options.respawns)
        if made or refused:
            control_log.add(*refused, *made)
        if (there := waiting.goes_on) is not None:
            if not at:
                return msgspec.structs.replace(there, faults=())
            layout = ("degrees", *LAYOUT_OF_DEGREES)
            with open_store(store) as reader:
                return resumed(store, reader, run, {name: getattr(there, name) for name in layout}, layout)
        meanwhile()
        _hear(membership)


def _hear(membership: Membership) -> None:
    """What the agent reports is no news any more, but is to be read."""
    try:
        membership.poll(_POLL_S)
    except AgentLost:
        time.sleep(_POLL_S)
