"""The named devices that the sleeping and the virtual device emulate.

A profile is a `CostModel` of a healthy device; message and iteration end cost nothing, because the processes' own messages
and collectives take real time on the sleeping device. `--layers`, `--dim`, `--tokens` name the maths that is executed, the
profile names the time it takes.

* steady: a forward of 4 layers over 200 tokens of two documents takes about 22 ms, a backward twice that; of one 256-token
  document a quarter is the quadratic part.
* long-context: attention dominates: four fifths of one 256-token document.
* older: a generation behind `steady`: 1.3 times as long per token, twice as long in attention.

A run's ranks may emulate different ones: ``steady,4-7=older`` (`--profile`).
"""

from __future__ import annotations

import re

from unskew.analytics.core.cost import ChunkCost, CostModel


class ProfileError(ValueError):
    """An unknown profile; the message is one sentence."""


def _twice(forward: ChunkCost) -> CostModel:
    backward = ChunkCost(layer_us=2 * forward.layer_us, token_us=2 * forward.token_us, token2_us=2 * forward.token2_us)
    return CostModel(chunks={"F": forward, "B": backward})


PROFILES: dict[str, CostModel] = {
    "steady": _twice(ChunkCost(layer_us=800.0, token_us=20.0, token2_us=0.03)),
    "long-context": _twice(ChunkCost(layer_us=600.0, token_us=8.0, token2_us=0.15)),
    "older": _twice(ChunkCost(layer_us=1000.0, token_us=26.0, token2_us=0.06)),
}


def profile(name: str) -> CostModel:
    """The cost model of a profile. Raises `ProfileError`."""
    if name not in PROFILES:
        raise ProfileError(f"--profile {name} is not known, allowed: {', '.join(PROFILES)}")
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
            raise ProfileError(f"--profile {text}: {other} is not understood, allowed: RANK=NAME or FIRST-LAST=NAME")
        low, high, name = int(found[1]), int(found[2] or found[1]), found[3]
        if not low <= high < ranks:
            raise ProfileError(f"--profile {text}: ranks {low} to {high} are not among the run's, allowed: 0 to {ranks - 1}")
        profile(name)
        names[low : high + 1] = [name] * (high + 1 - low)
    return tuple(names)
