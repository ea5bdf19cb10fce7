"""Data: constants, rates, lengths, noise, profiles, clusters, each with its source; and a recorded run."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import msgspec

_T = TypeVar("_T")
DEMO = Path(__file__).with_name("demo")
"""A recorded run, as a store to be read: eight ranks, of which one turns slow and another dies (tools/demo.sh)."""


class DataError(ValueError):
    """A shipped table that is not as it must be; one sentence."""


def table(name: str, of: type[_T]) -> _T:
    """The shipped table `name`.toml. Raises `DataError`."""
    try:
        return msgspec.toml.decode((files(__name__) / f"{name}.toml").read_bytes(), type=of)
    except msgspec.DecodeError as error:
        raise DataError(f"data/{name}.toml: {error}") from None
