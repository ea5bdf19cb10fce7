"""The rates, bandwidths, efficiencies and costs of data/constants.toml by name.

>>> constant("hbm_gib_a100")
80.0
"""

from __future__ import annotations

import msgspec

from unskew.data import table


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`value` in `unit`, and its source ("ours" = a choice of ours, with its reason)."""

    value: float
    unit: str
    source: str


CONSTANTS = table("constants", dict[str, Constant])


def constant(name: str) -> float:
    """The value of a constant. Raises `KeyError` for a name that is not in the table."""
    return CONSTANTS[name].value
