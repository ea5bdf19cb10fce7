"""What is put back, moved, cut or gone: nothing is destroyed by it, nothing counted twice, and `check` says so."""

from __future__ import annotations

import errno
import fcntl
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.store.filled_store import collect, decide, fill, opened

from unskew.collector.events import Note, Span
from unskew.collector.files import manifest
from unskew.collector.files.manifest import load
from unskew.collector.files.segment import SpoolSegment, held_final
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.read.views import VIEWS
from unskew.collector.service import collecting, ingest, retention, sealing
from unskew.collector.service.check import check
from unskew.collector.service.collecting import Collector, prune_older
from unskew.collector.service.rebuild import rebuild
from unskew.collector.service.sealing import sweep
from unskew.collector.write import control_stream, spool
from unskew.collector.write.commands import hold_controller_lock
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

pytestmark = pytest.mark.limit(120)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def sealed(store: Store, run: str) -> Store:
    fill(store, run, "rank-0000.1", 100)
    decide(store, run, "controller.1")
    collect(store)
    return store


def files(store: Store) -> set[Path]:
    return {path for folder in ("sealed", "published", "spool") for path in (store.root / folder).rglob("*") if path.is_file()}


def events(store: Store) -> int:
    with open_store(store) as reader:
        return int(reader.sql("select count(*) from events").item())


def rollups(store: Store) -> list[str]:
    with open_store(store) as reader:
        return sorted(map(str, reader.sql("select * from rollups").rows()))


def ask(store: Store) -> object:
    return check(store, mend=True)


def seal_more(store: Store) -> object:
    return Collector(store).step()


@pytest.mark.slow
@pytest.mark.parametrize("act", [ask, seal_more, rebuild, events])
def test_without_its_manifest_a_store_is_neither_empty_nor_swept(store: Store, act: Callable[[Store], object]) -> None:
    sealed(store, "r")
    before = files(store)
    store.manifest.unlink()
    with pytest.raises(StoreError, match="is gone, and it alone names"):
        act(store)
    assert files(store) == before


@pytest.mark.slow
def test_by_a_manifest_from_before_nothing_newer_is_removed(store: Store) -> None:
    before = sealed(store, "first").manifest.read_bytes()
    fill(store, "first", "rank-0000.2", 100)
    collect(store)
    sealed(store, "second")
    held, newest = files(store), store.manifest.read_bytes()
    count = events(store)
    store.manifest.write_bytes(before)
    named = [
        one.sentence for one in check(store, mend=True).findings if "is not in manifest.json, which is older" in one.sentence
    ]
    assert [sentence.split(":")[0] for sentence in named] == ["run first", "run second", "run second"]
    fill(store, "third", "rank-0000.1", 10)
    for act in (seal_more, rebuild, collecting.compact_all):
        with pytest.raises(StoreError, match=r"older|damaged or gone"):
            act(store)
    shutil.rmtree(store.spool("third"))
    assert held <= files(store)
    store.manifest.write_bytes(newest)
    assert check(store, mend=False).well
    assert events(store) == count


def test_by_a_manifest_from_before_a_compaction_the_merged_file_stays(store: Store) -> None:
    for number in (1, 2):
        with hold_controller_lock(store, "r"):
            fill(store, "r", f"rank-000{number}.1", 50)
        with closing(ingest.working_database(store)) as database:
            sealing.seal(store, database, "r")
    before = store.manifest.read_bytes()
    assert collecting.compact_all(store) == (2, 1)
    held = {path for path in files(store) if "sealed" in path.parts}
    store.manifest.write_bytes(before)
    assert not check(store, mend=True).well
    with pytest.raises(StoreError, match="older"):
        sealing.sweep(store)
    assert held <= files(store)


@pytest.mark.parametrize("number", [0, 1])
def test_a_spool_file_that_is_gone_is_noticed_also_the_first(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(spool, "ROTATE_BYTES", 8000)
    with hold_controller_lock(store, "r"):
        fill(store, "r", "rank-0000.1", 400)
        assert check(store, mend=False).findings == ()
        sorted((store.spool("r") / "rank-0000.1").iterdir())[number].unlink()
        (finding,) = check(store, mend=False).findings
    assert "writer rank-0000.1 lacks" in finding.sentence
    collect(store)
    assert load(store).problems == (finding.sentence,)


def test_what_is_no_file_of_ours_in_the_spool_is_left_alone(store: Store) -> None:
    fill(store, "r", "rank-0000.1", 10)
    folder = store.spool("r") / "rank-0000.1"
    shutil.copy(folder / "000000000000.jsonl", folder / "000000000000 copy.jsonl")
    (store.root / "spool" / ".cache").mkdir()
    assert events(store) == 11
    assert check(store, mend=False).well
    collect(store)
    assert events(store) == 11
    assert (folder / "000000000000 copy.jsonl").exists()


def test_an_append_that_a_kill_cut_is_no_damage_once_its_writer_is_back(store: Store) -> None:
    with hold_controller_lock(store, "r"):
        decide(store, "r", "controller")
        with (store.spool("r") / "controller@control" / "000000000001.jsonl").open("ab") as file:
            file.write(b'{"crc32":1,"bytes":500}\n{"seq":4,')
        decide(store, "r", "controller")
    collect(store)
    assert check(store, mend=False).findings == ()
    with open_store(store) as reader:
        assert reader.sql("select version from events order by version")["version"].to_list() == [1, 2, 3, 4, 5, 6]


def test_a_stream_does_not_go_on_in_place_of_its_damaged_file(store: Store) -> None:
    with hold_controller_lock(store, "r"):
        stream = ControlStream(store, "r", "control", "c")
        stream.append(0, [Note(text="a", by="b")], actor="c")
        stream.close()
        path = store.spool("r") / "c@control" / "000000000001.jsonl"
        damaged = path.read_bytes().replace(b'"a"', b'"b"')
        path.write_bytes(damaged)
        stream = ControlStream(store, "r", "control", "c")
        with closing(stream), pytest.raises(StoreError, match=r"000000000001\.jsonl is damaged"):
            stream.append(stream.version, [Note(text="a", by="b")], actor="c")
        assert path.read_bytes() == damaged


def test_a_stream_that_is_opened_while_it_is_sealed_goes_on_at_its_version(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(store, "r", "controller.1")

    def sealed_meanwhile(of: Store) -> manifest.Manifest:
        now = load(of)
        with closing(ingest.working_database(store)) as database:
            sealing.seal(store, database, "r")
        return now

    monkeypatch.setattr(control_stream, "load", sealed_meanwhile)
    with closing(ControlStream(store, "r", "control", "controller.2")) as stream:
        assert stream.version == 3


def test_a_file_that_is_removed_while_it_is_opened_is_made_anew(tmp_path: Path) -> None:
    path, opened = tmp_path / "000000000000.jsonl", list[SpoolSegment]()
    path.touch()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as the collector, which has found it empty
        opening = threading.Thread(target=lambda: opened.append(SpoolSegment(tmp_path, 0)))
        opening.start()
        time.sleep(0.2)
        path.unlink()
    opening.join(10.0)
    assert opened[0].write(b"there") == 5
    assert path.read_bytes() == b"there"
    with held_final(path) as size:
        assert size is None
    opened[0].close()


@contextmanager
def living(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpoolWriter]:
    """A run that goes on, most of which is sealed."""
    monkeypatch.setattr(spool, "ROTATE_BYTES", 8000)
    monkeypatch.setattr(sealing, "SEAL_BYTES", 1000)
    with hold_controller_lock(store, "on"):
        writer = SpoolWriter(store, "on", "rank-0000.1")
        for number in range(400):
            writer.append(
                Span(kind="B", device="d", rank=1, plan_version=0, attempt=0, iteration=number, start_us=1, wall_us=7)
            )
            if number % 20 == 19:
                assert writer.hand_over(30.0)
        Collector(store).step()
        yield writer
        assert writer.close()


@pytest.mark.slow
def test_what_is_pruned_of_a_living_run_does_not_come_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with living(store, monkeypatch):
        before = rollups(store)
        (dropped,) = prune_older(store, time.time_ns() // 1000)
        assert events(store) == 400 - dropped.rows < 400
        Collector(store).step()
        assert events(store) == 400 - dropped.rows
        assert rollups(store) == before
        assert check(store, mend=False).findings == ()


def test_retention_makes_room_on_a_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed(store, "r")

    def full(at: Store, fresh: manifest.Manifest) -> None:
        if at.database.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        manifest.publish(at, fresh)

    def no_room(_: Store) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(retention, "publish", full)
    monkeypatch.setattr(collecting, "write_snapshot", no_room)
    assert [one.rows for one in prune_older(store, time.time_ns() // 1000)] == [101]
    assert not store.database.exists()
    assert check(store, mend=False).well


def test_nothing_is_pruned_before_what_it_comes_to_is_published(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr("unskew.collector.projections.publish", refuse)
    sealed(store, "r")
    with pytest.raises(StoreError, match="nothing was dropped"):
        prune_older(store, time.time_ns() // 1000)
    assert events(store) == 104


@pytest.mark.slow
def test_damage_in_all_that_is_left_of_pruned_telemetry_is_named_and_not_called_mended(store: Store) -> None:
    sealed(store, "r")
    prune_older(store, time.time_ns() // 1000)
    path = next((store.root / "published").glob("*rollups*"))
    whole, before = path.read_bytes(), files(store)
    path.chmod(0o644)
    path.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    (finding,) = check(store, mend=True).findings
    assert (finding.mended, "is damaged" in finding.sentence) == (False, True)
    assert files(store) == before
    path.write_bytes(whole)
    assert check(store, mend=True).findings == ()


@pytest.mark.slow
def test_rebuild_proves_its_work_while_a_run_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with living(store, monkeypatch) as writer:
        over = threading.Event()

        def go_on() -> None:
            while not over.wait(0.002):
                writer.append(Span(kind="F", device="d", rank=1, plan_version=0, attempt=0, iteration=1, start_us=1, wall_us=7))

        going = threading.Thread(target=go_on)
        going.start()
        rebuilt = rebuild(store)
        over.set()
        going.join()
        assert rebuilt.different == ()
        assert writer.hand_over(30.0)
        assert events(store) > rebuilt.after["events"][0] >= 400
        assert check(store, mend=False).findings == ()


@pytest.mark.slow
def test_the_database_can_be_opened_whatever_the_collector_has_done_since(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of the moment when a collector last made it; what it reads stays until there is another."""
    sealed(store, "r")

    def asked() -> list[tuple[object, ...]]:
        with opened(store) as database:
            return [database.sql(f"select count(*) from {view}").fetchall()[0] for view in VIEWS]

    before = asked()
    for number in range(4):  # collectors that are killed before they write it
        fill(store, f"r{number}", "rank-0000.1", 100)
        collector = Collector(store)
        with monkeypatch.context() as patch:
            patch.setattr(collector, "_compact", lambda *_, **__: False)
            while collector.step():
                pass
    assert asked() == before
    assert check(store, mend=True).findings == ()
    collect(store)
    sweep(store)
    assert {path.parent.name for path in files(store) if path.suffix != ".parquet"} == set()
    assert {str(path.relative_to(store.root)) for path in files(store)} == {
        one.file for one in (*load(store).sealed, *load(store).published)
    }


def test_the_database_reads_what_check_has_made_anew(store: Store) -> None:
    sealed(store, "r")
    path = next((store.root / "published").glob("*rollups*"))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9] + b"012345678")
    (finding,) = check(store, mend=True).findings
    assert finding.mended
    with opened(store) as database:
        assert database.sql("select count(*) from rollups").fetchall() != [(0,)]


def test_damage_that_no_collector_has_seen_is_told_with_the_answer(store: Store) -> None:
    """As of an imported log, at which none looks before a run comes."""
    fill(store, "r", "rank-0000.1", 100)
    with open_store(store) as reader:
        assert reader.problems == ()
    path = next((store.root / "spool" / "r").rglob("*.jsonl"))
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with open_store(store) as reader:
        (problem,) = reader.problems
    assert problem.startswith("run r: ")
    assert "are damaged and were passed over" in problem


def test_a_writer_says_when_the_disk_did_not_take_its_last_events(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = SpoolWriter(store, "r", "rank-0000.1")
    monkeypatch.setattr(SpoolSegment, "write", full)
    writer.append(Span(kind="F", device="d", rank=1, plan_version=0, attempt=0, iteration=1, start_us=1, wall_us=7))
    assert not writer.close(30.0)
