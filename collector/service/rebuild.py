"""Making store.duckdb and the projections anew from the log, with the proof that every view answers as before.

The proof is a digest per view: the number of its rows and the sum of their hashes, whatever their order. It is taken by a
reader before and after, and of the new database, all three with the open lines of before: runs go on meanwhile.
`events.pos` is left out: for a reader, lines that are not sealed have none.
"""

from __future__ import annotations

import contextlib

import duckdb
import msgspec

from unskew.collector import projections
from unskew.collector.files.manifest import load, publish
from unskew.collector.paths import Store
from unskew.collector.read.reader import Reader
from unskew.collector.read.views import VIEWS
from unskew.collector.service.ingest import working_database
from unskew.collector.service.sealing import sweep
from unskew.collector.service.snapshot import write_snapshot

Digest = tuple[int, str]
"""Rows of a view, and the sum of their hashes."""


class RebuildDigests(msgspec.Struct, frozen=True, kw_only=True):
    """Digests by view: of a reader before and after, of the database that was made."""

    before: dict[str, Digest]
    after: dict[str, Digest]
    database: dict[str, Digest]

    @property
    def different(self) -> tuple[str, ...]:
        """The views that do not answer alike."""
        return tuple(name for name, digest in self.before.items() if {self.after[name], self.database[name]} != {digest})


def rebuild(store: Store) -> RebuildDigests:
    """Make anew what is made of the log; for the one process that maintains the store."""
    with Reader(store) as reader:
        before = {name: _digest(reader.duckdb(_query(name))) for name in VIEWS}
        sweep(store)
        with contextlib.closing(working_database(store)) as working:
            manifest = load(store)
            fresh = projections.rebuild(working, store, manifest)
            publish(store, msgspec.structs.replace(manifest, number=manifest.number + 1, published=fresh))
        reader._turn(load(store))
        write_snapshot(store, reader)
        with duckdb.connect(str(store.database), read_only=True) as snapshot:
            snapshot.execute("set variable store = ?", [str(store.root)]).fetchall()
            database = {name: _digest(snapshot.sql(_query(name))) for name in VIEWS}
        after = {name: _digest(reader.duckdb(_query(name))) for name in VIEWS}
    sweep(store)
    return RebuildDigests(before=before, after=after, database=database)


def _query(view: str) -> str:
    columns = "* exclude (pos)" if view == "events" else "*"
    return f"select count(*), coalesce(sum(hash(one)::hugeint), 0)::varchar from (select {columns} from {view}) one"


def _digest(answer: duckdb.DuckDBPyRelation) -> Digest:
    ((count, total),) = answer.fetchall()
    return count, total
