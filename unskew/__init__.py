"""Unskew keeps large hybrid-parallel training fast when its hardware is not.

>>> import unskew
>>> reader = unskew.open_store()                       # doctest: +SKIP
>>> reader.sql("select * from verdicts")               # doctest: +SKIP
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unskew.collector.paths import Store
    from unskew.collector.reader import Reader

__version__ = version("unskew")
__all__ = ["Store", "__version__", "open_store"]


def open_store(path: str | None = None) -> Reader:
    """A reader of the store at `path`, else $UNSKEW_STORE, else data/store; needs no lock and no running collector."""
    from unskew.collector import reader
    from unskew.collector.paths import Store

    return reader.open_store(Store.locate(path))


def __getattr__(name: str) -> Any:
    if name == "Store":
        from unskew.collector.paths import Store

        return Store
    raise AttributeError(f"module 'unskew' has no attribute {name!r}")
