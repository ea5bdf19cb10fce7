"""The named devices that the sleeping and the virtual device emulate (data/profiles.toml).

A profile is a `CostModel` of a healthy device; message and iteration end cost nothing, because the processes' own messages
and collectives take real time on the sleeping device. A run's layers, width and tokens name the maths that is executed, the
profile names the time it takes. A run's ranks may emulate different ones: ``steady,4-7=older``.
"""

from __future__ import annotations

import re

import msgspec

from unskew.analytics.core.cost import ChunkCost, CostModel, Costs
from unskew.data import table


class ProfileError(ValueError):
    """An unknown profile; the message is one sentence."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table: what a forward costs, and, where they were measured, the two halves of a backward: the gradient of
    activations and that of weights. Without them a backward costs twice a forward."""

    forward: ChunkCost
    activations: ChunkCost | None = None
    weights: ChunkCost | None = None
    source: str

    @property
    def chunks(self) -> Costs:
        if self.activations is None or self.weights is None:
            return {"F": self.forward, "B": self.forward.times(2)}
        return {"F": self.forward, "B": self.activations, "W": self.weights}


PROFILES = {name: CostModel(chunks=row.chunks) for name, row in table("profiles", dict[str, Profile]).items()}


def profile(name: str) -> CostModel:
    """The cost model of a profile. Raises `ProfileError`."""
    if name not in PROFILES:
        raise ProfileError(f"profile={name} is not known, allowed: {', '.join(PROFILES)}")
    return PROFILES[name]


def profiles_of(text: str, ranks: int) -> tuple[str, ...]:
    """The name of each rank's profile. `text`: a name, then, if you like, others for some ranks: ``NAME,4-7=NAME,2=NAME``.

    Raises `ProfileError`.

    >>> profiles_of("steady,2-3=older", 5)
    ('steady', 'steady', 'older', 'older', 'steady')
    """
    first, *others = text.split(",")
    profile(first)
    names = [first] * ranks
    for other in others:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?=(.+)", other)
        if not found:
            raise ProfileError(f"profile={text}: {other} is not understood, allowed: RANK=NAME or FIRST-LAST=NAME")
        low, high, name = int(found[1]), int(found[2] or found[1]), found[3]
        if not low <= high < ranks:
            raise ProfileError(f"profile={text}: ranks {low} to {high} are not among the run's, allowed: 0 to {ranks - 1}")
        profile(name)
        names[low : high + 1] = [name] * (high + 1 - low)
    return tuple(names)
