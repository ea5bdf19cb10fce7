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
LASTS = 8
"""So many iterations in a row must show what was lost from sight: on a restless machine it came and went every few."""
LEAST_CHANGE = 0.25
"""By this part of what it adds to the healthy time the smallest slowdown has to change to be news."""


class LimitState(msgspec.Struct, frozen=True):
    """What was logged last (None in warm-up), and for which smallest slowdowns. How many iterations in a row have not been
    judged, how many of them all, and how many were judged in vain; for how many in a row more than what was logged has been
    `seen_again`, never less than before, and as `regained` says at last."""

    logged: DetectionLimit | None = None
    named: tuple[float, ...] = ()
    in_a_row: int = 0
    unjudged: int = 0
    iterations: int = 0
    in_vain: int = 0
    seen_again: int = 0
    regained: DetectionLimit | None = None

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
        hidden = [unexplained.words] if unexplained is not None and unexplained.too_much else []  # a slow device's, maybe
        if state.unjudged > MOST_UNJUDGED * state.iterations and state.unjudged >= PATIENCE:
            hidden.append(f"the log of {state.unjudged} of {state.iterations} iterations came too late or not at all")
        if blind or hidden:
            state = msgspec.structs.replace(state, in_vain=state.in_vain + 1)
            if self.logged is None and state.in_vain < IN_VAIN:
                return state, []
            of_devices = of_device.smallest_slowdown if of_device.sees and of_device.compares and not hidden else None
            why = "; ".join([*blind, *hidden, *(bounds if of_devices is not None else [])])
            found = DetectionLimit(at_iteration=iteration, smallest_slowdown=None, why=why, of_devices=of_devices)
            return state._found(found, () if of_devices is None else (of_devices,))
        why = "; ".join([*bounds, *map(seen, of_job)])
        found = DetectionLimit(at_iteration=iteration, smallest_slowdown=of_device.smallest_slowdown, why=why)
        return state._found(found, tuple(one.smallest_slowdown or 1.0 for one in (of_device, *of_job)))

    def passed_over(self, iteration: int) -> tuple[LimitState, list[DetectionLimit]]:
        """The log of an iteration was not complete: nobody was judged by it."""
        state = msgspec.structs.replace(
            self,
            in_a_row=self.in_a_row + 1,
            unjudged=self.unjudged + 1,
            iterations=self.iterations + 1,
            seen_again=0,
            regained=None,
        )
        if state.in_a_row != PATIENCE or self.logged is None:
            return state, []
        why = f"the log of the last {PATIENCE} iterations came too late or not at all"
        return state._found(DetectionLimit(at_iteration=iteration, smallest_slowdown=None, why=why), ())

    def ended(self) -> tuple[LimitState, list[DetectionLimit]]:
        """Nothing more comes: what is seen again is so for good."""
        found = self.regained
        return (self, []) if found is None else (msgspec.structs.replace(self, logged=found, regained=None), [found])

    def _found(self, found: DetectionLimit, named: tuple[float, ...]) -> tuple[LimitState, list[DetectionLimit]]:
        """What is lost from sight is news at once; what is seen again, or better, once that has lasted."""
        if self.logged is not None:
            more = _seen_by(found) - _seen_by(self.logged)
            changes = self._changes(named) if more == 0 else []
            less = self.regained is not None and _seen_by(found) < _seen_by(self.regained)
            again = 1 if less else self.seen_again + 1
            if (more > 0 or (changes and max(changes) < 0)) and again < LASTS:
                return msgspec.structs.replace(self, seen_again=again, regained=found), []
        state = msgspec.structs.replace(self, seen_again=0, regained=None)
        if self.logged is not None and more == 0 and not changes and not _other_reason(self.logged, found):
            return state, []
        return msgspec.structs.replace(state, logged=found, named=named), [found]

    def _changes(self, named: tuple[float, ...]) -> list[float]:
        """Of the smallest slowdowns, as far as they are news."""
        moved = [(now - was, was) for now, was in zip(named, self.named, strict=True)]
        return [by for by, was in moved if abs(by) > LEAST_CHANGE * (was - 1.0)]


def _other_reason(before: DetectionLimit, found: DetectionLimit) -> bool:
    """Another than the one that stands, which has stood long enough: the shares in it change all the time."""
    other = found.smallest_slowdown is None and found.why != before.why
    return other and found.at_iteration >= max(AGAIN * before.at_iteration, before.at_iteration + IN_VAIN)


def _seen_by(limit: DetectionLimit) -> int:
    """How much: nothing, devices, the whole job too."""
    return 2 if limit.smallest_slowdown is not None else int(limit.of_devices is not None)
