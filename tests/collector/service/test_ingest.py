"""The collector: exactly once under kill -9, sealing that readers do not notice, a database that may be lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest
from support.paths import ROOT
from support.store.filled_store import opened

from unskew.collector.events import Note, Span
from unskew.collector.files.manifest import Manifest, PublishedFile, SealedFile, begin, load, publish
from unskew.collector.files.segment import control_line
from unskew.collector.files.tail import Tail
from unskew.collector.locks import is_held
from unskew.collector.paths import Store
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.projections.published import file_of
from unskew.collector.read.reader import Reader, open_store
from unskew.collector.service import compaction, retention, sealing
from unskew.collector.service.collecting import Collector
from unskew.collector.service.ingest import working_database
from unskew.collector.service.process import ensure_collector
from unskew.collector.service.sealing import seal, sweep
from unskew.collector.write.commands import hold_controller_lock
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

PRODUCER = ROOT / "tests" / "support" / "store" / "collector_producer.py"
SMALL_STEPS = """if True:
    import sys
    from unskew.collector.service import sealing, process as service
    service.STEP_S, sealing.SEAL_BYTES = 0.02, 400_000
    sys.exit(service.main(sys.argv[1:]))
"""
RANKS, SPANS = 8, 4000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def spool_spans(store: Store, writer: str, count: int) -> None:
    spool = SpoolWriter(store, "r", writer)
    for number in range(count):
        spool.append(
            Span(kind="F", device="d", rank=0, plan_version=0, attempt=0, iteration=number // 10, start_us=number, wall_us=1)
        )
    assert spool.close(10.0)


def counts(reader: Reader) -> tuple[int, int]:
    """Rows and distinct (writer, seq): equal when no row is seen in two forms."""
    return reader.sql("select count(*), count(distinct (writer, seq)) from events where run = 'r'").row(0)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.limit(180)
def test_nothing_is_lost_or_doubled_when_the_collector_is_killed_again_and_again(store: Store) -> None:
    collecting = [sys.executable, "-c", SMALL_STEPS, "--store", str(store.root), "--idle-s", "1"]
    producers = [
        subprocess.Popen([sys.executable, str(PRODUCER), str(store.root), "r", str(rank), str(SPANS), "1500"])
        for rank in range(RANKS)
    ]
    kills, seen, chance = 0, 0, random.Random(4)
    with open_store(store) as reader:
        while any(producer.poll() is None for producer in producers) or kills < 5:
            collector = subprocess.Popen(collecting)
            until = time.monotonic() + chance.uniform(0.5, 1.5)
            while time.monotonic() < until:
                reader.refresh()
                rows, distinct = counts(reader)
                assert rows == distinct
                assert rows >= seen, "rows that were seen have gone"
                seen = rows
            collector.kill()
            collector.wait()
            kills += 1
    assert [producer.wait() for producer in producers] == [0] * RANKS
    subprocess.run(collecting, check=True)

    total = RANKS * SPANS
    manifest = load(store)
    assert manifest.problems == ()
    assert sum(sealed.rows for sealed in manifest.sealed) == total
    assert all(hashlib.sha256((store.root / one.file).read_bytes()).hexdigest() == one.sha256 for one in manifest.sealed)
    assert not store.spooled_runs()
    with open_store(store) as reader:
        assert counts(reader) == (total, total)
        assert reader.sql("select count(distinct pos) from events").item() == total
        assert reader.sql("select max(seq), count(*) from spans group by writer").rows() == [(SPANS - 1, SPANS)] * RANKS
    with opened(store) as database:  # anybody may open it afterwards
        assert database.sql("select count(*), count(distinct (writer, seq)) from spans").fetchall() == [(total, total)]


def test_a_living_run_keeps_its_spool_files_and_a_finished_one_does_not(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "SEAL_BYTES", 2_000_000)
    with open_store(store) as reader, hold_controller_lock(store, "r"):
        spool_spans(store, "rank-0000.1", 25_000)
        reader.refresh()
        assert counts(reader) == (25_000, 25_000)
        database = working_database(store)
        assert seal(store, database, "r") == 25_000
        assert len(Tail(store, "r").poll()) == 25_000, "the controller follows the files"
        assert counts(reader) == (25_000, 25_000)
        reader.refresh()
        assert counts(reader) == (25_000, 25_000)
        spool_spans(store, "rank-0001.1", 10)
        assert seal(store, database, "r") == 0, "too little to seal while the run lives"
    with open_store(store) as reader:
        assert seal(store, database, "r") == 10
        assert not store.spooled_runs()
        assert counts(reader) == (25_010, 25_010), "read before the files went"
        reader.refresh()
        assert counts(reader) == (25_010, 25_010)
    database.close()


def test_what_is_far_behind_is_sealed_in_portions_by_two_threads_and_sorted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "SEAL_BYTES", 600_000)
    monkeypatch.setattr(sealing, "SEAL_MOST_BYTES", 1_200_000)
    for rank in range(3):
        spool_spans(store, f"rank-000{rank}.1", 12_000)
    collecting, steps, threads = Collector(store), 0, set[tuple[int]]()
    with hold_controller_lock(store, "r"):
        while collecting.step() and (collecting.behind or not steps):
            steps += 1
            assert collecting._database is not None
            threads |= set(collecting._database.sql("select current_setting('threads')").fetchall())
        assert threads == {(min(2, len(os.sched_getaffinity(0))),)}
        assert steps > 2
        collecting.close()
    sealed = load(store).sealed
    assert max(one.rows for one in sealed) < 12_000
    assert sum(one.rows for one in sealed) == 36_000
    for one in sealed:
        order = duckdb.sql(f"select iteration, rank, writer, seq from read_parquet('{store.root / one.file}')").fetchall()
        assert order == sorted(order)


def test_files_without_a_line_that_can_be_read_do_not_keep_the_rest_from_being_sealed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "SEAL_BYTES", 1)
    monkeypatch.setattr(sealing, "SEAL_MOST_BYTES", 1)
    damaged = store.spool("r") / "damaged.1"
    damaged.mkdir(parents=True)
    for number in range(3):
        (damaged / f"{number:012d}.jsonl").write_bytes(b"{}}\n")
        os.utime(damaged / f"{number:012d}.jsonl", (1, 1))
    spool_spans(store, "rank-0000.1", 100)
    with hold_controller_lock(store, "r"), contextlib.closing(working_database(store)) as database:
        assert seal(store, database, "r") == 100
    assert len(load(store).problems) == 3


def test_small_files_of_a_run_that_goes_on_are_merged_once_they_make_a_large_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "SEAL_BYTES", 1)
    monkeypatch.setattr("unskew.collector.service.compaction.SMALL_ROWS", 250)
    collecting, files = Collector(store), []
    with hold_controller_lock(store, "r"):
        for incarnation in range(5):
            spool_spans(store, f"rank-0000.{incarnation}", 100)
            for _ in range(2):  # it merges when it finds nothing to seal
                collecting.step()
            files.append([one.rows for one in load(store).sealed])
        collecting.close()
    assert files == [[100], [100, 100], [300], [300, 100], [300, 100, 100]]
    with open_store(store) as reader:
        assert counts(reader) == (500, 500)


def test_a_file_is_not_sealed_while_its_writer_lives(store: Store) -> None:
    writer = SpoolWriter(store, "r", "rank-0000.1")
    stream = ControlStream(store, "r", "plan", "controller.1")
    stream.append(0, [Note(text="a", by="b")], actor="c")
    database = working_database(store)
    assert seal(store, database, "r") == 0
    stream.close()
    writer.close()
    assert seal(store, database, "r") == 1
    again = ControlStream(store, "r", "plan", "controller.2")
    assert again.version == 1, "known from the manifest"
    again.append(1, [Note(text="b", by="b")], actor="c")
    again.close()
    assert seal(store, database, "r") == 1
    database.close()
    with open_store(store) as reader:
        assert reader.sql("select version from events order by version")["version"].to_list() == [1, 2]
        assert reader.problems == ()


@pytest.mark.parametrize("moment", ["before the seal", "after the seal", "while its files are removed"])
def test_a_collector_that_lost_its_memory_goes_on_where_the_manifest_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    spool_spans(store, "rank-0000.1", 100)
    with contextlib.closing(working_database(store)) as database:
        if moment == "before the seal":
            monkeypatch.setattr(sealing, "publish", refuse)
        elif moment == "after the seal":
            monkeypatch.setattr(sealing, "_remove_spool", refuse)
        else:
            monkeypatch.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="killed here"):
            seal(store, database, "r")
    monkeypatch.undo()
    spool_spans(store, "rank-0001.1", 50)
    with contextlib.closing(working_database(store)) as database:
        sweep(store)
        assert seal(store, database, "r") == (150 if moment == "before the seal" else 50)
    assert not store.spooled_runs()
    with open_store(store) as reader:
        assert counts(reader) == (150, 150)
        assert reader.sql("select count(distinct pos) from events").item() == 150


def refuse(*_: object, **__: object) -> None:
    raise OSError("killed here")


def test_what_a_killed_collector_did_not_publish_is_swept_away(store: Store) -> None:
    spool_spans(store, "rank-0000.1", 100)
    database = working_database(store)
    begin(store)
    stray = store.sealed("r") / "000000.parquet"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half a file")
    with open_store(store) as reader:
        assert counts(reader) == (100, 100)
    sweep(store)
    assert not stray.exists()
    assert seal(store, database, "r") == 100
    database.close()


def test_a_reader_survives_that_a_sealed_file_is_replaced(store: Store) -> None:
    spool_spans(store, "rank-0000.1", 100)
    database = working_database(store)
    seal(store, database, "r")
    database.close()
    with open_store(store) as reader:
        manifest = load(store)
        (old,) = manifest.sealed
        moved = SealedFile(
            **{**{name: getattr(old, name) for name in SealedFile.__struct_fields__}, "file": "sealed/r/merged.parquet"}
        )
        (store.root / old.file).rename(store.root / moved.file)
        publish(store, Manifest(number=manifest.number + 1, sealed=(moved,)))
        assert counts(reader) == (100, 100)


def test_holes_in_the_log_are_told(store: Store) -> None:
    folder = store.spool("r") / "controller.1@plan"
    folder.mkdir(parents=True)
    lines = [control_line(1, "plan", version, "c", Note(text="x", by="c")) for version in (1, 2, 4)]
    (folder / "000000000001.jsonl").write_bytes(b"".join(lines) + b'{"seq":5,"at_\n')
    database = working_database(store)
    seal(store, database, "r")
    database.close()
    with open_store(store) as reader:
        assert reader.problems == (
            "run r: 1 lines of spool/r/controller.1@plan/000000000001.jsonl are no events and were passed over",
            "run r: writer controller.1@plan lacks 1 lines",
            "run r: stream plan has 3 events, 3 versions, the last is 4: each must be there once",
        )


def test_a_finished_run_leaves_no_spool_and_its_names_no_manifest(store: Store) -> None:
    SpoolWriter(store, "r", "idle.1").close()
    spool_spans(store, "rank-0000.1", 100)
    for folder, line in (("torn.1", b'{"seq":0,"at_'), ("damaged.1", b"{}}\n")):
        path = store.spool("r") / folder
        path.mkdir()
        (path / "000000000000.jsonl").write_bytes(line)
    for number in (1, 2):
        stream = ControlStream(store, "r", "plan", f"controller.{number}")
        stream.append(number - 1, [Note(text="a", by="b")], actor="c")
        stream.close()
    database = working_database(store)
    assert seal(store, database, "r") == 102
    assert store.spooled_runs() == []
    names = [(one.kind, file.writer, file.last_seq) for one in load(store).sealed for file in one.replaces]
    assert names == [("control", "controller.2@plan", 2)], "the stream's version"
    (problem,) = load(store).problems
    assert problem == "run r: 4 bytes at byte 0 of spool/r/damaged.1/000000000000.jsonl are damaged and were passed over"
    database.close()
    stream = ControlStream(store, "r", "plan", "controller.3")
    assert stream.version == 2
    stream.close()


def test_what_a_killed_collector_removed_leaves_the_manifest_at_the_next_start(store: Store) -> None:
    spool_spans(store, "rank-0000.1", 10)
    database = working_database(store)
    with hold_controller_lock(store, "r"):
        with pytest.MonkeyPatch.context() as small:
            small.setattr(sealing, "SEAL_BYTES", 1)
            assert seal(store, database, "r") == 10
        assert load(store).sealed[0].replaces
    database.close()
    shutil.rmtree(store.spool("r"))
    sweep(store)
    assert load(store).sealed[0].replaces == ()


def test_a_manifest_that_did_not_change_is_not_parsed_again(store: Store) -> None:
    store.root.mkdir()
    publish(store, Manifest(number=1))
    first = load(store)
    assert load(store) is first
    publish(store, Manifest(number=2))
    assert load(store).number == 2


@pytest.mark.slow
def test_who_opens_the_database_file_stops_nobody_and_is_stopped_by_nobody(store: Store) -> None:
    spool_spans(store, "rank-0000.1", 10)
    collecting = [sys.executable, "-m", "unskew.collector.service.process", "--store", str(store.root), "--idle-s", "0"]
    subprocess.run(collecting, check=True)
    with duckdb.connect(str(store.database)) as mine:  # to write, which locks the file
        spool_spans(store, "rank-0001.1", 5)
        subprocess.run(collecting, check=True)
        assert mine.sql("select count(*) from made").fetchall() == [(1,)]
    with opened(store) as now:
        assert now.sql("select count(*) from events").fetchall() == [(15,)]


@pytest.mark.slow
@pytest.mark.limit(90)
def test_the_collector_comes_when_needed_goes_when_asked_and_comes_back_when_killed(store: Store) -> None:
    def wait_for(held: bool) -> None:
        while is_held(store.lock("collector")) is not held:
            time.sleep(0.05)

    with hold_controller_lock(store, "r"):
        first = ensure_collector(store)
        assert first is not None
        assert ensure_collector(store) is None, "one is on its way"
        wait_for(True)
        assert ensure_collector(store) is None
        os.kill(first, signal.SIGKILL)
        wait_for(False)
        while (second := ensure_collector(store)) is None:
            time.sleep(0.05)
        wait_for(True)
        spool_spans(store, "rank-0000.1", 10)
        os.kill(second, signal.SIGTERM)
        assert os.waitpid(second, 0)[1] == 0
    with opened(store) as database:
        assert database.sql("select count(*) from log").fetchall() == [(10,)]


def test_old_files_go_and_small_ones_are_merged_whatever_tiers_there_are() -> None:
    """A tier names only the runs that it has rows of; a run that another tier has is covered all the same."""

    def file(run: str, number: int) -> SealedFile:
        return SealedFile(
            run=run, file=f"sealed/{run}/{number}.parquet", kind="telemetry", rows=100, sha256="", first=number, last=number,
            last_pos=number, replaces=(), last_at_us=1_000 + number,
        )  # fmt: skip

    def tier(number: int, covers: dict[str, int]) -> list[PublishedFile]:
        return [
            PublishedFile(name=name, file=file_of(number, name), rows=1, sha256="", code="", covers=covers)
            for name in PROJECTIONS
        ]

    sealed = (*(file("old", number) for number in range(3)), file("new", 0), file("new", 1))
    manifest = Manifest(number=1, sealed=sealed, published=(*tier(1, {"old": 1}), *tier(2, {"new": 0})))
    due = retention.due(manifest, older_than_us=2_000)
    assert [(one.run, one.first) for one in due] == [("old", 0), ("old", 1), ("new", 0)]
    (group,) = compaction.due(manifest, over=frozenset({"old", "new"}))
    assert [(one.run, one.first) for one in group] == [("old", 0), ("old", 1)]
