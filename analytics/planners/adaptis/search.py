"""AdaPtis' search: moves of partition, placement and schedule, chosen by where the idle time lies (tune.py describes the
rule)."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec
import numpy as np

from unskew.analytics.pipeline.bubbles import bubbles
from unskew.analytics.pipeline.dag import Array
from unskew.analytics.pipeline.schedule import build_schedule, evaluate, per_hop
from unskew.analytics.planners.adaptis.dispatch import DispatchOptions, DispatchResult, PipelineTask, dispatch
from unskew.analytics.planners.adaptis.layouts import PipelineLayout, moved_stages, shifted_boundaries
from unskew.analytics.planners.adaptis.task import AdaptisTask, stage_costs, stage_held, stage_kept, untimed

MOST_TRIED = 40  # moves of one kind tried per round: with many stages there are a thousand


Move = tuple[PipelineLayout, DispatchOptions]
"""Where a move leads."""


class SearchState(msgspec.Struct, frozen=True):
    """A layout under knobs, and its order."""

    layout: PipelineLayout
    knobs: DispatchOptions
    found: DispatchResult

    @property
    def us(self) -> float:
        return self.found.makespan_us


class AdaptisSearch:
    """Dispatches layouts, remembers what it has seen, and counts."""

    def __init__(self, task: AdaptisTask, limit: float) -> None:
        self.task, self.limit, self.used = task, limit, 0
        self.seen: dict[tuple[PipelineLayout, DispatchOptions], DispatchResult] = {}
        self.random = np.random.default_rng(0)
        self._moves = {"partition": self._partitions, "placement": self._placements, "schedule": self._schedules}

    def seed(self, layout: PipelineLayout) -> SearchState:
        """The layout under the better of two sets of knobs."""
        states = [self._state(layout, DispatchOptions(self.limit, turn=turn)) for turn in ("latest", "groups")]
        return min(states, key=lambda state: state.us)

    def climb(self, state: SearchState, until: int) -> SearchState:
        """Step 3 of the module's list, until `until` dispatches have been used in all."""
        best = state
        while self.used < until and state.us < inf:
            rule = self._rule(state)
            for kind in (rule, *(other for other in self._moves if other != rule)):
                if (better := self._improved(state, kind, until)) is not None:
                    state = better
                    break
            else:
                best = min(best, state, key=lambda tried: tried.us)
                state = self._kicked(best)
        return min(best, state, key=lambda tried: tried.us)

    def _improved(self, state: SearchState, kind: str, until: int) -> SearchState | None:
        """The first of some moves of a kind that ends earlier than `state`."""
        moves = list(self._moves[kind](state))
        for number in self.random.permutation(len(moves))[:MOST_TRIED].tolist():
            if self.used >= until:
                return None
            tried = self._state(*moves[number])
            if tried.us < state.us * (1 - 1e-9):
                return tried
        return None

    def _kicked(self, state: SearchState) -> SearchState:
        """Two random moves on; the state itself when they lead nowhere. It counts as a dispatch where it found nothing new, so
        that the search of a small task ends when it has seen everything."""
        moved, before = state, self.used
        for _ in range(2):
            kind = str(self.random.choice(list(self._moves)))
            moves = list(self._moves[kind](moved))
            if moves:
                tried = self._state(*moves[int(self.random.integers(len(moves)))])
                if tried.us < inf:
                    moved = tried
        self.used += self.used == before
        return moved

    def _state(self, layout: PipelineLayout, knobs: DispatchOptions) -> SearchState:
        key = (layout, knobs)
        if key not in self.seen:
            self.used += 1
            stages = stage_costs(self.task, layout)
            pipe = PipelineTask(
                f_us=stages[0].tolist(),
                b_us=stages[1].tolist(),
                w_us=stages[2].tolist(),
                kept=stage_kept(self.task, layout).tolist(),
                device=layout.device,
                n_devices=len(self.task.speeds),
                micro_batches=self.task.micro_batches,
                message_us=self.task.message_us,
                held=stage_held(self.task, layout),
            )
            self.seen[key] = dispatch(pipe, knobs)
        return SearchState(layout, knobs, self.seen[key])

    def _rule(self, state: SearchState) -> str:
        idle, boundary, residual = self._bubbles(state)
        smallest = self.task.micro_batches * float(self.task.costs_us.sum(axis=0).min())
        if idle.max() - idle.min() > smallest:
            return "partition"
        return "placement" if boundary.sum() > residual.sum() else "schedule"

    def _bubbles(self, state: SearchState) -> tuple[Array, Array, Array]:
        """Idle, boundary and residual time per device; a device without a stage is idle throughout."""
        schedule = build_schedule(untimed(state.layout, state.found.lists).plan())
        durations = per_hop(schedule.chunks, stage_costs(self.task, state.layout))
        timeline = evaluate(schedule, durations, self.task.message_us)
        classed = bubbles(schedule.chunks, timeline.start_us, timeline.end_us)
        idle = np.full(len(self.task.speeds), state.us)
        boundary, residual = idle.copy(), np.zeros_like(idle)
        ranks = list(classed.ranks)
        idle[ranks], boundary[ranks], residual[ranks] = classed.idle_us, classed.boundary_us, classed.residual_us
        return idle, boundary, residual

    def _loads(self, layout: PipelineLayout) -> Array:
        loads = np.zeros(len(self.task.speeds))
        np.add.at(loads, list(layout.device), stage_costs(self.task, layout).sum(axis=0))
        return loads

    def _worth(self, state: SearchState, layouts: Iterator[PipelineLayout]) -> Iterator[Move]:
        """Those whose busiest device alone does not need much longer than the present plan."""
        for layout in layouts:
            if self._loads(layout).max() * self.task.micro_batches < 1.05 * state.us:
                yield layout, state.knobs

    def _partitions(self, state: SearchState) -> Iterator[Move]:
        return self._worth(state, shifted_boundaries(state.layout))

    def _placements(self, state: SearchState) -> Iterator[Move]:
        loads = self._loads(state.layout)
        return self._worth(state, moved_stages(state.layout, int(loads.argmax()), int(loads.argmin())))

    def _schedules(self, state: SearchState) -> Iterator[Move]:
        changed = msgspec.structs.replace
        for patience in (0.0, 0.25, 0.5, 1.0, 2.0):
            yield state.layout, changed(state.knobs, patience=patience)
        for turn in ("latest", "groups", "lowest"):
            for forward_first in (False, True):
                yield state.layout, changed(state.knobs, turn=turn, forward_first=forward_first)
        for share in (1.0, 0.9, 0.75):
            yield state.layout, changed(state.knobs, limit=share * self.limit)
