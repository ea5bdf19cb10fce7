"""Who executes a stage: one rank, or the members of a tensor-parallel group with their shares of its layers.

A group's layers are shared out like layers among stages: in whole units (attention heads), so that the member that needs most
time needs as little as it can (`share_out`, exact). A unit is what the model can cut, so a real device does what was predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import msgspec

from unskew.analytics.core.layout import Group
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.core.sharing import share_out
from unskew.analytics.shards.parts import ends_of


class Crew(msgspec.Struct, frozen=True):
    """`ranks` in the order of their shards; `shares`: what each has of a layer, in any unit; () = the same."""

    ranks: Group
    shares: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {'-'.join(map(str, self.ranks))}"

    @property
    def weights(self) -> tuple[float, ...]:
        """Each member's share over an equal one."""
        whole = sum(self.shares)
        return tuple(share * len(self.ranks) / whole for share in self.shares) or (1.0,) * len(self.ranks)


class RankTime(msgspec.Struct, frozen=True):
    """Mean microseconds of F + B of one micro-batch on a crew at its estimated speed: per layer, and for the output head."""

    layer_us: float
    head_us: float


class Crews(msgspec.Struct, frozen=True):
    """`time_of`: what a crew takes; `cut`: a group with shares by its members' speeds; raises
    `PlanError` for one with more members than a layer has units."""

    time_of: Callable[[Crew], RankTime]
    cut: Callable[[Group], Crew]


def cut_by_times(ranks: Group, times: Sequence[float], units: int) -> Crew:
    """The group in which the member that needs most time needs least, when a whole layer takes member i `times[i]`; `units`: in
    how many a layer can be cut. Raises `PlanError`.

    >>> cut_by_times((4, 5), [1.0, 2.0], 12).shares
    (8, 4)
    """
    if len(ranks) == 1:
        return Crew(ranks)
    if units < len(ranks):
        raise PlanError(f"{len(ranks)} ranks are no tensor-parallel group where a layer has {units} units to cut")
    if max(times) == min(times) and units % len(ranks) == 0:
        return Crew(ranks)
    return Crew(ranks, tuple(share_out(units, [(0.0, time) for time in times])))


def crew_in(plan: Plan, ranks: Group) -> Crew:
    """The crew as `plan` has it."""
    parts = [ends_of(plan.role_of[rank].part) for rank in ranks]
    unit = lcm(*(end.denominator for ends in parts for end in ends))
    shares = tuple(int((high - low) * unit) for low, high in parts)
    return Crew(ranks, () if len(set(shares)) == 1 else shares)
