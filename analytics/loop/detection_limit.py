"""What would be named in a live run from now on, logged when it changed: so that calm can be read from the log."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unskew.analytics.core.outcome import Sight, UnexplainedTime, blindness, closest, seen
from unskew.collector.events import DetectionLimit

PATIENCE = 5
"""So many iterations in a row that could not be judged are no accident."""
MOST_UNJUDGED = 0.1
"""Nor is this part of all of them."""
IN_VAIN = 20
"""So many judged iterations that show nothing are no warm-up any more."""
AGAIN = 2
"""A reason that has changed is logged anew when the run is so many times as long as when it was logged."""
LEAST_CHANGE = 0.25
"""By this part of what it adds to the healthy time the smallest slowdown has to change to be news."""


class LimitState(msgspec.Struct, frozen=True):
    """What was logged last (None in warm-up), and for which smallest slowdowns. How many iterations in a row have not been
    judged, how many of them all, and how many were judged in vain."""

    logged: DetectionLimit | None = None
    named: tuple[float, ...] = ()
    in_a_row: int = 0
    unjudged: int = 0
    iterations: int = 0
    in_vain: int = 0

    def judged(
        self, sights: Sequence[Sight], iteration: int, unexplained: UnexplainedTime | None = None
    ) -> tuple[LimitState, list[DetectionLimit]]:
        """An iteration was judged; `sights`: what would have been named, of devices and of the whole job; `unexplained`: what
        long iterations took."""
        state = msgspec.structs.replace(self, in_a_row=0, iterations=self.iterations + 1)
        of_device, of_job = (
            closest([one for one in sights if one.scope != "job"]),
            [one for one in sights if one.scope == "job"],
        )
        bounds = [of_device.why] if of_device.why else []
        blind = [blindness(one) for one in (of_device, *of_job) if not one.sees]
        if unexplained is not None and unexplained.too_much:
            blind.append(unexplained.words)
        if state.unjudged > MOST_UNJUDGED * state.iterations and state.unjudged >= PATIENCE:
            blind.append(f"the log of {state.unjudged} of {state.iterations} iterations came too late or not at all")
        if blind:
            state = msgspec.structs.replace(state, in_vain=state.in_vain + 1)
            return state._blinded("; ".join(blind), iteration, at_once=self.logged is not None or state.in_vain >= IN_VAIN)
        named = tuple(one.smallest_slowdown or 1.0 for one in (of_device, *of_job))
        if self._sees and all(abs(now - was) <= LEAST_CHANGE * (was - 1.0) for now, was in zip(named, self.named, strict=True)):
            return state, []
        why = "; ".join([*bounds, *map(seen, of_job)])
        limit = DetectionLimit(at_iteration=iteration, smallest_slowdown=of_device.smallest_slowdown, why=why)
        return msgspec.structs.replace(state, logged=limit, named=named), [limit]

    def passed_over(self, iteration: int) -> tuple[LimitState, list[DetectionLimit]]:
        """The log of an iteration was not complete: nobody was judged by it."""
        state = msgspec.structs.replace(
            self, in_a_row=self.in_a_row + 1, unjudged=self.unjudged + 1, iterations=self.iterations + 1
        )
        if state.in_a_row != PATIENCE or self.logged is None:
            return state, []
        return state._blinded(f"the log of the last {PATIENCE} iterations came too late or not at all", iteration)

    @property
    def _sees(self) -> bool:
        return self.logged is not None and self.logged.smallest_slowdown is not None

    def _news(self, why: str, iteration: int) -> bool:
        """Another reason than the one that stands, which has stood long enough: the shares in it change all the time."""
        assert self.logged is not None
        stood = self.logged.at_iteration
        return why != self.logged.why and iteration >= max(AGAIN * stood, stood + IN_VAIN)

    def _blinded(self, why: str, iteration: int, *, at_once: bool = True) -> tuple[LimitState, list[DetectionLimit]]:
        if not at_once or (self.logged is not None and not self._sees and not self._news(why, iteration)):
            return self, []
        limit = DetectionLimit(at_iteration=iteration, smallest_slowdown=None, why=why)
        return msgspec.structs.replace(self, logged=limit), [limit]
