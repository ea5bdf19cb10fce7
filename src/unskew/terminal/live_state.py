"""What a run's terminal view knows: a fold over the run's log entries, without clock or terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from unskew.analytics.core.plan import Plan
from unskew.collector import events as ev
from unskew.collector.files.tail import Entry
from unskew.terminal.sentences import Sentence, say

HISTORY = 60
"""Iterations kept for the curves."""
REMEMBERED = 12
"""Sentences kept on screen."""


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its place, what it holds and executes, and its chunk times over the prediction for a healthy device."""

    rank: int
    replica: int
    stage: int
    first_layer: int | None = None
    n_layers: int = 0
    micro_batches: int = 0
    ratio: float | None = None
    lost: str | None = None


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: the first two are known when it is committed, the others when it is judged a moment later."""

    iteration: int
    loss: float | None = None
    tokens_per_s: float | None = None
    measured_s: float | None = None
    predicted_s: float | None = None


class Line(msgspec.Struct, frozen=True):
    """A sentence and the last committed iteration when it was said; None before the first."""

    iteration: int | None
    sentence: Sentence


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """`past` are the last iterations, oldest first; `iteration` is the last committed one, `waiting` the optional proposal that
    nobody has decided on."""

    run: str = ""
    device: str = ""
    mode: str = ""
    iterations: int | None = None
    iteration: int | None = None
    plan_version: int = 0
    started_us: int | None = None
    at_us: int = 0
    past: tuple[Past, ...] = ()
    ranks: dict[int, RankView] = {}
    waiting: str | None = None
    lines: tuple[Line, ...] = ()
    finished: ev.RunFinished | None = None

    @property
    def done(self) -> int:
        """How many iterations are committed; the last of them has a number one less."""
        return 0 if self.iteration is None else self.iteration + 1

    @property
    def shown(self) -> Past | None:
        """The newest iteration of which all is known, so that no figure of one stands beside a figure of another; before the
        first was judged, the newest committed one."""
        committed = [one for one in self.past if one.loss is not None]
        whole = [one for one in committed if one.measured_s is not None]
        return next(reversed(whole or committed), None)


def fold(state: LiveState, entry: Entry) -> LiveState:
    """The state after one more entry of the run's log; entries of one iteration may come in any order of writers."""
    event = entry.event
    state = _change(msgspec.structs.replace(state, at_us=max(state.at_us, entry.at_us)), event, entry.at_us)
    sentence = say(event)
    if sentence is not None:
        state = msgspec.structs.replace(state, lines=(*state.lines, Line(state.iteration, sentence))[-REMEMBERED:])
    return state


def _change(state: LiveState, event: ev.Event | None, at_us: int) -> LiveState:
    replace = msgspec.structs.replace
    match event:
        case ev.RunStarted():
            state = replace(
                state,
                run=event.run,
                device=event.device,
                mode=event.mode,
                iterations=event.options.get("iterations"),
                started_us=at_us,
            )
        case ev.ModeChanged():
            state = replace(state, mode=event.mode)
        case ev.RunFinished():
            state = replace(state, finished=event)
        case ev.PlanProposed() if event.optional:
            state = replace(state, waiting=event.proposal)
        case ev.PlanApproved() | ev.PlanRejected() | ev.PlanExpired() if event.proposal == state.waiting:
            state = replace(state, waiting=None)
        case ev.PlanApplied():
            state = replace(state, plan_version=event.plan_version, ranks=_places(state.ranks, Plan.from_data(event.plan)))
        case ev.DeviceLost() if event.rank in state.ranks:
            lost = replace(state.ranks[event.rank], lost="dead" if event.how == "exit" else event.how, ratio=None)
            state = replace(state, ranks={**state.ranks, event.rank: lost})
        case ev.IterationCommitted() if state.iteration is None or event.iteration > state.iteration:
            rate = event.tokens / (event.wall_us / 1e6) if event.wall_us else None
            past = _known(state.past, event.iteration, loss=event.loss, tokens_per_s=rate)
            state = replace(state, iteration=event.iteration, past=past)
        case ev.IterationJudged():
            predicted_s = None if event.predicted_us is None else event.predicted_us / 1e6
            past = _known(state.past, event.iteration, measured_s=event.measured_us / 1e6, predicted_s=predicted_s)
            state = replace(state, past=past, ranks=_ratios(state.ranks, event.ranks))
    return state


def _known(past: tuple[Past, ...], iteration: int, **news: Any) -> tuple[Past, ...]:
    """`past` with what is now known of an iteration."""
    before = {one.iteration: one for one in past}
    before[iteration] = msgspec.structs.replace(before.get(iteration, Past(iteration=iteration)), **news)
    return tuple(before[number] for number in sorted(before))[-HISTORY:]


def _places(before: dict[int, RankView], plan: Plan) -> dict[int, RankView]:
    """Every rank ever seen, at its place in the plan; a rank without a role keeps its last place and holds nothing."""
    executes = Counter(rank for route in plan.routes for rank in {rank for hop in route.hops for rank in hop.ranks})
    after = {
        rank: msgspec.structs.replace(view, first_layer=None, n_layers=0, micro_batches=0) for rank, view in before.items()
    }
    for role in plan.roles:
        view = before.get(role.rank)
        after[role.rank] = RankView(
            rank=role.rank,
            replica=role.replica,
            stage=role.stage,
            first_layer=role.first_layer,
            n_layers=role.n_layers,
            micro_batches=executes[role.rank],
            ratio=view.ratio if view else None,
        )
    return dict(sorted(after.items()))


def _ratios(ranks: dict[int, RankView], judged: tuple[ev.RankRatio, ...]) -> dict[int, RankView]:
    after = dict(ranks)
    for ratio in judged:
        if ratio.rank in after and after[ratio.rank].lost is None and ratio.predicted_us:
            after[ratio.rank] = msgspec.structs.replace(after[ratio.rank], ratio=ratio.measured_us / ratio.predicted_us)
    return after
