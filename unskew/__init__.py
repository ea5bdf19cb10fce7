"""Unskew keeps large hybrid-parallel training fast when its hardware is not.

>>> import unskew
>>> reader = unskew.open_store()                       # doctest: +SKIP
>>> reader.sql("select * from verdicts")               # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from unskew.collector.paths import Store
    from unskew.collector.reader import Reader

__all__ = ["Store", "__version__", "open_store"]


def open_store(path: str | None = None) -> Reader:
    """A reader of the store at `path`, else $UNSKEW_STORE, else data/store; needs no lock and no running collector."""
    from unskew.collector import reader
    from unskew.collector.paths import Store

    return reader.open_store(Store.locate(path))


def __getattr__(name: str) -> Any:
    # On demand, because every command imports this module first.
    if name == "Store":
        from unskew.collector.paths import Store

        return Store
    if name == "__version__":
        from importlib.metadata import version

        return version("unskew")
    raise AttributeError(f"module 'unskew' has no attribute {name!r}")
