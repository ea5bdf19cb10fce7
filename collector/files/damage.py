"""A file of the store that cannot be read as it should: which one, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

from unskew.collector.paths import StoreError

_FILE = re.compile(r"""['"](/[^'"\n]*/(?:sealed|published)/[^'"\n]*\.parquet)['"]""")


class DamagedError(StoreError):
    """A sealed or published file cannot be read."""


def damage(error: Exception) -> DamagedError | None:
    """What an error of DuckDB or Arrow reports about a sealed or published file; None when it names no such file."""
    if isinstance(error, DamagedError):
        return error
    named = _FILE.search(str(error))
    if named is None:
        return None
    if "Too many open files" in str(error):
        return DamagedError(f"{named[1]} cannot be opened, because this process has too many open files: raise ulimit -n")
    return DamagedError(
        f"{named[1]} cannot be read, it is damaged or gone: unskew store check names what else is and mends what it can"
    )


@contextmanager
def naming_damage() -> Iterator[None]:
    """Errors about a file of the store become `DamagedError`; those about a query stay."""
    try:
        yield
    except duckdb.Error as error:
        damaged = damage(error)
        if damaged is None:
            raise
        raise damaged from error
