"""Taking new lines of all runs of a store into rows, in memory, until they are sealed.

Nothing here needs to survive: the spool is the truth until the manifest names the sealed file that replaces it, and the
manifest is swapped in one breath. A collector that was killed goes on where the manifest says that its spool files end, so no
line is lost and none is taken twice, whatever was killed and when.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import duckdb
import msgspec

from unskew.collector import rows
from unskew.collector.manifest import Replaced, load
from unskew.collector.paths import Store
from unskew.collector.tail import Damage, Lines, Place, Tail

SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "memory_limit": "256MB",
    "preserve_insertion_order": False,
}
"""Of every DuckDB that the collector works with; what needs more goes to the store's folder `spill`."""


class Taken(msgspec.Struct, frozen=True):
    """How far a spool file is taken; `first_pos` is the position of its first row."""

    writer: str
    segment: int
    bytes: int
    rows: int
    last_seq: int
    first_pos: int

    def replaced(self) -> Replaced:
        """The file as the manifest names it when it is sealed whole."""
        return Replaced(writer=self.writer, segment=self.segment, bytes=self.bytes, rows=self.rows, last_seq=self.last_seq)


class Ingest:
    """Takes new lines of all runs of a store. For the one process that holds the collector's lock.

    A row is in table `hot` of `database` from when it is taken until the sealed file that has it is in the manifest.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        manifest = load(store)
        self.database = working_database(store)
        last = [one.last_pos for one in manifest.sealed] + [one.last_pos for one in manifest.pruned]
        self._next_pos = 1 + max(last, default=-1)
        self._tails: dict[str, Tail] = {}
        self._files: defaultdict[str, dict[Place, Taken]] = defaultdict(dict)
        self._damage: defaultdict[str, dict[Damage, None]] = defaultdict(dict)

    def step(self) -> int:
        """Take what is new; returns the number of rows."""
        return sum(self._take(run) for run in self._store.spooled_runs())

    @property
    def behind(self) -> bool:
        """Whether the last step left lines that were there."""
        return any(tail.behind for tail in self._tails.values())

    def is_behind(self, run: str) -> bool:
        """The same of one run."""
        return self._tail(run).behind

    def files(self, run: str) -> Mapping[Place, Taken]:
        """How far each spool file of `run` is taken that is not sealed."""
        return self._files[run]

    def sealed(self, run: str, files: Sequence[Replaced]) -> None:
        """`files` of `run` are in a manifest that is published: their rows leave `hot`."""
        places = [run, [one.writer for one in files], [one.segment for one in files]]
        # Made anew rather than deleted from: rows deleted from a table in memory keep their place.
        self.database.execute(
            "create or replace table hot as select * from hot where run != ? or (writer, segment) not in "
            "(select (unnest(?::varchar[]), unnest(?::bigint[])))",
            places,
        ).fetchall()
        for file in files:
            self._files[run].pop((file.writer, file.segment), None)

    def forget(self, run: str) -> None:
        """The spool files of `run` are gone."""
        self._tails.pop(run, None)
        self._files.pop(run, None)
        self._damage.pop(run, None)

    def offset(self, run: str, place: Place) -> int:
        """How many bytes of a spool file are taken or passed over."""
        return self._tail(run).offsets.get(place, 0)

    def damage(self, run: str) -> list[Damage]:
        """The passages of `run` that are not what was written, as far as this process came upon them."""
        return list(self._damage[run])

    def close(self) -> None:
        self.database.close()
        shutil.rmtree(self._store.spill, ignore_errors=True)

    def _tail(self, run: str) -> Tail:
        if run not in self._tails:
            sealed = {(file.writer, file.segment): file.bytes for _, file in load(self._store).replaced(run)}
            self._tails[run] = Tail(self._store, run, offsets=sealed)
        return self._tails[run]

    def _take(self, run: str) -> int:
        tail = self._tail(run)
        found = tail.poll_lines()
        count = rows.insert(self.database, "hot", run, found, self._next_pos)
        lines = rows.count_lines(found)
        tallies = [_tally(one) for one in found] if count == lines else self._counted(run, found)
        self._files[run].update(_advanced(self._files[run], tallies, tail.offsets, self._next_pos))
        self._next_pos += lines
        self._damage[run].update(dict.fromkeys(tail.damage))
        tail.damage.clear()
        return count

    def _counted(self, run: str, found: Sequence[Lines]) -> list[_Tally]:
        """What was inserted of each file when some lines were no events; these are noted."""
        held = {
            (writer, segment): (count, last)
            for writer, segment, count, last in self.database.execute(
                "select writer, segment, count(*), max(seq) from hot where run = ? and pos >= ? group by all",
                [run, self._next_pos],
            ).fetchall()
        }
        written: Counter[Place] = Counter()
        for lines in found:
            written[lines.writer, lines.segment] += lines.data.count(b"\n")
        for place, count in written.items():
            if lost := count - held.get(place, (0, -1))[0]:
                self._damage[run][Damage(*place, None, lost)] = None
        return [_Tally(*place, *held.get(place, (0, -1))) for place in written]


def working_database(store: Store) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory with the collector's limits and an empty table `hot`, which view `log` shows."""
    database = duckdb.connect(":memory:", config={**SETTINGS, "temp_directory": str(store.spill)})
    database.execute("set enable_progress_bar = false").fetchall()  # it would go to collector.log
    rows.create_table(database, "hot")
    database.execute("create view log as select * from hot").fetchall()
    return database


class _Tally(msgspec.Struct, frozen=True):
    """What one poll brought of a file."""

    writer: str
    segment: int
    rows: int
    last_seq: int


class _Seq(msgspec.Struct):
    seq: int


_decode_seq = msgspec.json.Decoder(_Seq).decode


def _tally(lines: Lines) -> _Tally:
    last = lines.data[lines.data.rfind(b"\n", 0, -1) + 1 :]
    return _Tally(lines.writer, lines.segment, lines.data.count(b"\n"), _decode_seq(last).seq)


def _advanced(
    files: Mapping[Place, Taken], tallies: Sequence[_Tally], offsets: Mapping[Place, int], first_pos: int
) -> dict[Place, Taken]:
    """The files that the tallies are of, as they stand with these."""
    fresh: dict[Place, Taken] = {}
    for one in tallies:
        place = (one.writer, one.segment)
        before = fresh.get(place) or files.get(place) or Taken(*place, 0, 0, -1, first_pos)
        count, last_seq = before.rows + one.rows, max(before.last_seq, one.last_seq)
        fresh[place] = Taken(*place, offsets[place], count, last_seq, before.first_pos)
    return fresh
