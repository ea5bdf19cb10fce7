"""The named devices that the sleeping and the virtual device emulate.

A profile is a `CostModel` of a healthy device; message and iteration end cost nothing, because the processes' own messages
and collectives take real time on the sleeping device. `--layers`, `--dim`, `--tokens` name the maths that is executed, the
profile names the time it takes.

* steady: a forward of 4 layers over 200 tokens of two documents takes about 22 ms, a backward twice that; of one 256-token
  document a quarter is the quadratic part.
* long-context: attention dominates: four fifths of one 256-token document.
"""

from __future__ import annotations

from unskew.analytics.cost import ChunkCost, CostModel


class ProfileError(ValueError):
    """An unknown profile; the message is one sentence."""


def _twice(forward: ChunkCost) -> CostModel:
    backward = ChunkCost(layer_us=2 * forward.layer_us, token_us=2 * forward.token_us, token2_us=2 * forward.token2_us)
    return CostModel(chunks={"F": forward, "B": backward})


PROFILES: dict[str, CostModel] = {
    "steady": _twice(ChunkCost(layer_us=800.0, token_us=20.0, token2_us=0.03)),
    "long-context": _twice(ChunkCost(layer_us=600.0, token_us=8.0, token2_us=0.15)),
}


def profile(name: str) -> CostModel:
    """The cost model of a profile. Raises `ProfileError`."""
    if name not in PROFILES:
        raise ProfileError(f"--profile {name} is not known, allowed: {', '.join(PROFILES)}")
    return PROFILES[name]
