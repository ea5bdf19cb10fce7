"""Unskew keeps large hybrid-parallel training fast when its hardware is not.

>>> import unskew
>>> log = unskew.open("data/store")                    # doctest: +SKIP
>>> log.sql("select * from verdicts")                  # doctest: +SKIP
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes longer to load than all else that happens before a command can be interrupted
if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Any

    __version__: str
    from unskew.collector.paths import Store
    from unskew.collector.read.reader import Reader
    from unskew.runtime.attach.session import LoopSession
    from unskew.runtime.control.summary import Summary

__all__ = ["Store", "__version__", "attach", "open", "train"]


def open(store: str | os.PathLike[str] | None = None) -> Reader:
    """The log of the store at `store`, else $UNSKEW_STORE, else data/store; needs no lock and no running collector.

    Its `sql`, `arrow` and `duckdb` answer a query, or a view by its name (docs/reference/sql.md), as Polars frame, Arrow
    table and DuckDB relation; `refresh` takes in what was written since. Raises `StoreError` for a bad path, or where there
    is no store.
    """
    from unskew.collector.paths import Store, StoreError
    from unskew.collector.read import reader

    found = Store.locate(store)
    if not found.root.is_dir():  # an empty answer would be taken for one
        raise StoreError(f"there is no store in {found.root}")
    return reader.open_store(found)


def attach(store: str | os.PathLike[str] | None = None, *, run: str | None = None) -> LoopSession:
    """Measure this process's training loop from its first `backward()` on, into the store at `store`, else $UNSKEW_STORE, else
    data/store; its ranks share `run`, else $UNSKEW_RUN, else what their launcher gave all of them.

    Never harms the loop: what cannot be measured is left out and told once. A second call returns the same session, whose
    `note(tokens=, loss=)` adds facts to the step in progress. UNSKEW=0 in the environment switches it off.
    """
    from unskew.runtime.attach import start

    return start.attach(store, run=run)


def train(
    model: str | Callable[[], Any] | None = None,
    data: str | Callable[..., Any] | None = None,
    *,
    faults: tuple[str, ...] | list[str] = (),
    **options: Any,
) -> Summary:
    """Train in parallel what `model` returns, a list of modules, on what `data` gives; the losses and what happened.

    Both are functions at the top of a module or script, or their names (docs/guide/own-model.md); without them it is the small
    Llama on text of `unskew run`, whose options `options` are, as Python names. Call it where the script is `__main__`, for the
    ranks' processes import the script. Raises `ValueError` for bad options before anything starts.
    """
    from unskew.runtime.control.from_python import train as run

    return run(model, data, faults, options)


def __getattr__(name: str) -> Any:
    # On demand, because every command imports this module first.
    if name == "Store":
        from unskew.collector.paths import Store

        return Store
    if name == "__version__":
        from importlib.metadata import version

        return version("unskew")
    raise AttributeError(f"module 'unskew' has no attribute {name!r}")
