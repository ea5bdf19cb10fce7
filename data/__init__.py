"""Data of the studies and emulated devices: constants, rates, lengths, noise, profiles, clusters, each with its source."""

from __future__ import annotations

from importlib.resources import files
from typing import TypeVar

import msgspec

_T = TypeVar("_T")


class DataError(ValueError):
    """A shipped table that is not as it must be; one sentence."""


def table(name: str, of: type[_T]) -> _T:
    """The shipped table `name`.toml. Raises `DataError`."""
    try:
        return msgspec.toml.decode((files(__name__) / f"{name}.toml").read_bytes(), type=of)
    except msgspec.DecodeError as error:
        raise DataError(f"data/{name}.toml: {error}") from None
