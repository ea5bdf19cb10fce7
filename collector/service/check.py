"""Verifying a store: everything whose change would change an answer is compared with what was written.

* sealed and published files: their sha256 against the manifest's; the manifest against its own checksum;
* spool files: the checksum of each flush; what a kill tore off is not a fault;
* the log: every seq of a writer once, every version of a control stream once, from 1 on; what
  full buffers dropped, and of a run that is over what its last words say to be missing, or that it has none of its own;
* store.duckdb: its rows against the spool lines they were taken from;
* projections: what is published against what the sealed files give.

That file and the projections are made of the rest, so they can be mended; the rest is named.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from functools import reduce
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from unskew.collector import projections
from unskew.collector.events import Dropped, RunFinished, RunStarted, tag_of
from unskew.collector.files import rows
from unskew.collector.files.manifest import Manifest, load, publish
from unskew.collector.files.segment import final_size, first_seq, is_torn, segment_name, segment_names, unpack
from unskew.collector.files.tail import Damage, SpoolLines, Tail, decode_event
from unskew.collector.log_gap import dropped_sentence, log_gap, with_dropped
from unskew.collector.paths import Store
from unskew.collector.service.ingest import working_database
from unskew.collector.service.sealing import ENDED_BY, sweep, unlisted
from unskew.collector.service.snapshot import write_snapshot
from unskew.collector.write.commands import controller_alive

_DROPPED = tag_of(Dropped).partition("@")[0]
NO_END = "its controller logged no end of it (it was killed, or could not write): what the log lacks of its end is not known"
_HELD = ", ".join(f'"{name}"' for name in rows.COLUMNS if name != "pos")
_DIGEST = f"select run, writer, segment, count(*), sum(hash({_HELD})::hugeint)::varchar from hot group by all"


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it was written, or not as it should be."""

    sentence: str
    mended: bool = False


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and what was found. `unchecked_lines` lie in spool files from before flushes had checksums."""

    events: int
    sealed_files: int
    spool_files: int
    published_files: int
    unchecked_lines: int
    findings: tuple[Finding, ...]

    @property
    def well(self) -> bool:
        return all(finding.mended for finding in self.findings)


def check(store: Store, *, mend: bool) -> CheckReport:
    """Verify `store`, which nobody else writes meanwhile but the runs. Raises `StoreError` when it has no readable manifest."""
    manifest = load(store)
    spool = list(_spool_files(store))
    found = [Finding(problem) for problem in manifest.problems]
    found += [Finding(problem) for problem in _sealed(store, manifest)]
    older = [Finding(problem) for problem in unlisted(store, manifest)]
    found += older
    mend = mend and not older  # by a manifest from before, what is newer would go
    found += [Finding(damage.sentence(run)) for run, _, damaged, _ in spool for damage in damaged]
    count = 0
    if not any("sha256" in finding.sentence for finding in found):  # else the rows cannot be read
        count, problems = _log(store, manifest)
        found += [Finding(problem) for problem in problems]
        found += _projections(store, manifest, mend=mend)
    found += _database(store, manifest, mend=mend)
    if mend:
        sweep(store)
    return CheckReport(
        events=count,
        sealed_files=len(manifest.sealed),
        spool_files=len(spool),
        published_files=len(manifest.published),
        unchecked_lines=sum(unchecked for *_, unchecked in spool),
        findings=tuple(dict.fromkeys(found)),
    )


def _sealed(store: Store, manifest: Manifest) -> Iterator[str]:
    for one in manifest.sealed:
        path = store.root / one.file
        if not path.is_file():
            yield f"run {one.run}: {one.file} ({one.rows} events) is gone, its sha256 cannot be compared"
        elif _sha256(path) != one.sha256:
            yield f"run {one.run}: {one.file} ({one.rows} events) is damaged: its sha256 is not the manifest's"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _spool_files(store: Store) -> Iterator[tuple[str, Path, list[Damage], int]]:
    """Each spool file: its run, its path, the damage in it, and how many of its lines have no checksum."""
    for run in store.spooled_runs():
        for folder in sorted(store.spool(run).iterdir()):
            for name in segment_names(folder):
                path, place = folder / name, (folder.name, first_seq(name))
                final, data = final_size(path) is not None, path.read_bytes()
                unpacked = unpack(data)
                damaged = [Damage(*place, at, size) for at, size in unpacked.damaged]
                rest = data[unpacked.used :]
                if final and rest and not is_torn(rest):
                    damaged.append(Damage(*place, unpacked.used, len(rest)))
                yield run, path, damaged, unpacked.unchecked


def _log(store: Store, manifest: Manifest) -> tuple[int, list[str]]:
    """How many events the log has, and what a complete one would not show. Pruned runs may lack seqs."""
    pruned = {one.run for one in manifest.pruned}
    with contextlib.closing(working_database(store)) as database:
        for run in store.spooled_runs():
            skip = {(replaced.writer, replaced.segment) for _, replaced in manifest.replaced(run)}
            tail = Tail(store, run, skip=skip)
            while rows.insert(database, "hot", run, tail.poll_lines()):
                pass
        files = ", ".join(rows.quoted(str(store.root / one.file)) for one in manifest.sealed)
        columns = "run, writer, seq, stream, version, actor, type, payload"
        sealed = f" union all select {columns} from read_parquet([{files}], union_by_name = true)" if files else ""
        database.execute(f"create view whole as select {columns} from hot{sealed}").fetchall()
        writers = database.sql(
            f"select run, writer, count(*), count(distinct seq), {rows.DUE_OF_WRITER} from whole "
            "group by run, writer order by all"
        ).fetchall()
        ends = database.sql(
            "select run, max(payload) filter (type = $1), max(payload) filter (type = $2), max(actor) filter (type = $2) "
            "from whole group by run order by run",
            params=[tag_of(RunStarted), tag_of(RunFinished)],
        ).fetchall()
        dropped = database.execute(
            "select run, payload from whole where type like ? order by run, writer, seq", [f"{_DROPPED}@%"]
        ).fetchall()
        streams = database.sql(
            "select run, stream, count(*), count(distinct version), max(version) from whole where stream is not null "
            "group by all order by all"
        ).fetchall()
    found = [
        f"run {run}: writer {writer} has {n - one_each} events twice"
        for run, writer, n, one_each, _ in writers
        if n != one_each
    ]
    found += [
        f"run {run}: writer {writer} lacks {due - one_each} lines"
        for run, writer, _, one_each, due in writers
        if one_each != due and run not in pruned
    ]
    found += [
        f"run {run}: stream {stream} has {n} events, {one_each} versions, the last is {due}: each must be there once"
        for run, stream, n, one_each, due in streams
        if not n == one_each == due
    ]
    for run, started, finished, by in ends:
        if gap := log_gap(_decoded(started), _decoded(finished)):
            found.append(f"run {run}: {gap}")
        elif started and (by == ENDED_BY or not (finished or controller_alive(store, run))):
            found.append(f"run {run}: {NO_END}")
    for run, lines in groupby(dropped, key=itemgetter(0)):
        lost: dict[str, int] = reduce(with_dropped, (_decoded(payload) for _, payload in lines), {})
        found.append(f"run {run}: {dropped_sentence(lost)}")
    return sum(n for _, _, n, _, _ in writers), found


def _decoded(payload: str | None) -> Any:
    return None if payload is None else decode_event(payload.encode())


def _projections(store: Store, manifest: Manifest, *, mend: bool) -> Iterator[Finding]:
    with contextlib.closing(working_database(store)) as connection:
        problems = projections.check(connection, store, manifest)
        # Of pruned telemetry nothing else is left: what is made anew would hold the damage, or lack what it hit.
        if manifest.pruned and projections.damaged_files(store, manifest):
            mend = False
        if problems and mend:
            fresh = projections.rebuild(connection, store, manifest)
            publish(store, msgspec.structs.replace(manifest, number=manifest.number + 1, published=fresh))
            write_snapshot(store)  # the one before reads the files of before
    for problem in problems:
        yield Finding(problem, mended=mend)


def _database(store: Store, manifest: Manifest, *, mend: bool) -> Iterator[Finding]:
    """The rows that store.duckdb holds against the lines they were taken from, unless it is of another moment."""
    if not store.database.exists():
        return
    problem = _difference(store, manifest)
    if problem and mend:
        try:
            write_snapshot(store)
        except duckdb.Error:  # a file that it should show cannot be read, which is named already
            mend = False
    if problem:
        yield Finding(f"{store.database.name}: {problem}", mended=mend)


def _difference(store: Store, manifest: Manifest) -> str | None:
    try:
        with duckdb.connect(str(store.database), read_only=True) as database, duckdb.connect(":memory:") as truth:
            if database.sql("select manifest from made").fetchall() != [(manifest.number,)]:
                return None
            database.execute("set variable store = ?", [str(store.root)]).fetchall()
            database.sql("select 1 from log limit 1").fetchall()  # it finds its files
            rows.create_table(truth, "hot")
            held = {row[:3]: row[3:] for row in database.sql(_DIGEST).fetchall()}
            for (run, writer, segment), (count, _) in held.items():
                path = store.spool(run) / writer / segment_name(segment)
                lines = unpack(path.read_bytes()).lines.splitlines(keepends=True) if path.exists() else []
                rows.insert(truth, "hot", run, [SpoolLines(writer, segment, b"".join(lines[:count]))])
            due = {row[:3]: row[3:] for row in truth.sql(_DIGEST).fetchall()}
    except (duckdb.Error, UnicodeDecodeError) as error:
        return f"it cannot be read ({str(error).partition(chr(10))[0]})"
    wrong = [place for place in sorted(held) if held.get(place) != due.get(place)]
    return f"the rows of {len(wrong)} spool files are not their lines, first {'/'.join(map(str, wrong[0]))}" if wrong else None
