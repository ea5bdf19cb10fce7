"""Work on a store that only one process may do, when that is not the collector: check, rebuild, compact, prune.

The lock ``maintenance`` asks the collector to leave; training and readers go on, and the collector comes back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unskew.collector.locks import hold
from unskew.collector.paths import Store, StoreError
from unskew.collector.rights import as_rights_of

LEAVES_S = 30.0


@contextmanager
def maintaining(store: Store) -> Iterator[None]:
    """Be the store's only writer. Raises `StoreError` when there is no store, or another process does not leave it."""
    if not store.root.is_dir():
        raise StoreError(f"there is no store in {store.root}")
    store.enter()
    asking = hold(store.maintenance, wait_s=0.0)
    if asking is None:
        raise StoreError(f"another process maintains {store.root} now: one at a time")
    with asking:
        lock = hold(store.lock("collector"), wait_s=LEAVES_S)
        if lock is None:
            raise StoreError(f"the collector of {store.root} did not leave within {LEAVES_S:g} s; see collector.log there")
        with lock, as_rights_of(store.root):
            yield
