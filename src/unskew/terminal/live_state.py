"""What a run's terminal view knows: a fold over the run's log entries, without clock or terminal."""

from __future__ import annotations

from typing import Any

import msgspec

from unskew.analytics.core import run_state
from unskew.analytics.core.outcome import Outcome, outcome_of_run
from unskew.analytics.core.plan import Role
from unskew.analytics.core.run_state import RunState
from unskew.collector import events as ev
from unskew.collector.files.tail import Entry
from unskew.terminal.sentences import Sentence, sentence_of

HISTORY = 60
"""Iterations kept for the curves."""
REMEMBERED = 12
"""Sentences kept on screen."""


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: the last role it had, whether it `holds` that still, how many micro-batches it executes, and its chunk times
    over the prediction for a healthy device."""

    role: Role
    holds: bool
    micro_batches: int
    ratio: float | None = None
    lost: str | None = None


class IterationView(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: the first two are known when it is committed, the others when it is judged a moment later."""

    iteration: int
    loss: float | None = None
    tokens_per_s: float | None = None
    measured_s: float | None = None
    predicted_s: float | None = None


class SentenceView(msgspec.Struct, frozen=True):
    """A sentence and the last committed iteration when it came; None before the first."""

    iteration: int | None
    sentence: Sentence


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """`past` are the last iterations, oldest first; `iteration` is the last committed one; `ratios` are those of `RankView`;
    `controlled`: a living controller holds the run; `silent`: its log has not changed for long."""

    run: RunState = RunState()
    iteration: int | None = None
    past: tuple[IterationView, ...] = ()
    ratios: dict[int, float] = {}
    lines: tuple[SentenceView, ...] = ()
    controlled: bool = True
    silent: bool = False

    @property
    def iterations(self) -> int | None:
        """How many were asked for; None for a run that does not say."""
        return self.run.started.options.get("iterations") if self.run.started is not None else None

    @property
    def done(self) -> int:
        """How many iterations are committed; the last of them has a number one less."""
        return 0 if self.iteration is None else self.iteration + 1

    @property
    def shown(self) -> IterationView | None:
        """The newest iteration of which all is known, so that no figure of one is beside a figure of another; before the
        first was judged, or where none will be any more, the newest committed one."""
        committed = [one for one in self.past if one.loss is not None]
        whole = [one for one in committed if one.measured_s is not None and not self.over]
        return next(reversed(whole or committed), None)

    @property
    def outcome(self) -> Outcome:
        """Wrong, well down to a stated slowdown, or why it cannot be judged."""
        return outcome_of_run(self.run, controlled=self.controlled)

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it: it has ended, or lost its controller."""
        return self.run.finished is not None or not self.controlled

    @property
    def waiting(self) -> str | None:
        """The proposal that waits for a person."""
        return self.run.waiting.proposed.proposal if self.run.waiting is not None and not self.over else None

    @property
    def ranks(self) -> dict[int, RankView]:
        """Every rank that ever had a role, at its last place."""
        if self.run.plan is None:
            return {}
        plan = self.run.plan.plan
        return {
            rank: RankView(
                role=role,
                holds=rank in plan.role_of,
                micro_batches=plan.executed[rank],
                ratio=self.ratios.get(rank),
                lost=_how(self.run.lost.get(rank)),
            )
            for rank, role in sorted(self.run.last_roles.items())
        }


def fold(state: LiveState, entry: Entry) -> LiveState:
    """The state after one more entry of the run's log; entries of one iteration may come in any order of writers."""
    event = entry.event
    state = _measured(msgspec.structs.replace(state, run=run_state.fold(state.run, event, entry.at_us)), event)
    sentence = sentence_of(event)
    if sentence is not None:
        kept = [one for one in state.lines if sentence.topic != "sight" or one.sentence.topic != "sight"]  # the last one counts
        lines = (*kept, SentenceView(state.iteration, sentence))[-REMEMBERED:]
        state = msgspec.structs.replace(state, lines=lines)
    return state


def _how(lost: ev.DeviceLost | None) -> str | None:
    if lost is None:
        return None
    return "dead" if lost.how == "exit" else lost.how


def _measured(state: LiveState, event: ev.Event | None) -> LiveState:
    replace = msgspec.structs.replace
    match event:
        case ev.IterationCommitted() if state.iteration is None or event.iteration > state.iteration:
            rate = event.tokens / (event.wall_us / 1e6) if event.wall_us else None
            past = _known(state.past, event.iteration, loss=event.loss, tokens_per_s=rate)
            return replace(state, iteration=event.iteration, past=past)
        case ev.IterationJudged():
            predicted_s = None if event.predicted_us is None else event.predicted_us / 1e6
            past = _known(state.past, event.iteration, measured_s=event.measured_us / 1e6, predicted_s=predicted_s)
            living = (one for one in event.ranks if one.rank not in state.run.lost and one.healthy_us)
            ratios = {**state.ratios, **{one.rank: one.measured_us / one.healthy_us for one in living}}
            return replace(state, past=past, ratios=ratios)
        case ev.DeviceLost():
            return replace(state, ratios={rank: ratio for rank, ratio in state.ratios.items() if rank != event.rank})
    return state


def _known(past: tuple[IterationView, ...], iteration: int, **news: Any) -> tuple[IterationView, ...]:
    """`past` with what is now known of an iteration."""
    before = {one.iteration: one for one in past}
    before[iteration] = msgspec.structs.replace(before.get(iteration, IterationView(iteration=iteration)), **news)
    return tuple(before[number] for number in sorted(before))[-HISTORY:]
