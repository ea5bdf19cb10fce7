"""A store is its owner's alone, or a group's; what it names, and what lies in it, leads nowhere else."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import duckdb
import msgspec
import pytest
from support.store.store_contract import note, span

from unskew.collector import rights
from unskew.collector.files.manifest import PublishedFile, SealedFile, SealedSpool, load, publish
from unskew.collector.files.segment import segment_name
from unskew.collector.formats.registry import bring_in
from unskew.collector.locks import hold, is_held
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.service.collecting import Collector, prune_older
from unskew.collector.service.maintenance import maintaining
from unskew.collector.service.process import trouble
from unskew.collector.write.commands import living_runs
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter


@pytest.fixture(params=[0, 0o77], ids=["umask 0", "umask 77"])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(Store(tmp_path_factory.mktemp("made") / "store")).root


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    return Store(shutil.copytree(made, tmp_path / "store"))


def filled(store: Store) -> Store:
    """Two runs, one of them sealed, with all that a collector makes."""
    for run in ("r", "s"):
        writer, stream = SpoolWriter(store, run, "rank-0000.1"), ControlStream(store, run, f"run/{run}", "controller")
        writer.append(span(1))
        stream.append(0, [note("begun")], actor="ada")
        assert writer.close()
        stream.close()
    with rights.as_rights_of(store.root):
        collector = Collector(store)
        collector.step()
        collector.close()
    writer = SpoolWriter(store, "s", "rank-0001.1")
    writer.append(span(2))
    assert writer.close()
    return store


def modes(store: Store) -> set[tuple[bool, int]]:
    """(folder, rights of owner, group and others) of everything in the store."""
    found = [store.root, *store.root.rglob("*")]
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode) & 0o777) for path in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "folder", "file"), [(rights.PRIVATE, 0o700, 0o600), (rights.SHARED, 0o770, 0o660)], ids=["private", "shared"]
)
@pytest.mark.usefixtures("_umask")
def test_everything_in_a_store_has_the_rights_of_its_folder(mode: int, folder: int, file: int, tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "store")
    store.enter(mode=mode)
    found = modes(filled(store))
    assert {one for kind, one in found if kind} == {folder}
    assert {one for kind, one in found if not kind} == {file, file & 0o444}  # what is sealed is written by nobody
    with pytest.raises(StoreError, match="has the rights"):
        store.enter(mode=rights.SHARED if mode == rights.PRIVATE else rights.PRIVATE)


def test_a_store_that_an_import_makes_is_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("step,seconds\n" + "".join(f"{step},0.1\n" for step in range(20)))
    tmp_path.chmod(0o755)
    bring_in(store := Store(tmp_path / "store"), "iteration-times", tmp_path / "t.csv", "r")
    assert {one for kind, one in modes(store) if kind} == {0o700}


def test_a_store_of_somebody_else_is_refused_in_a_sentence(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who is let in everywhere."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match="this user is not let into its folder"):
        Store.locate(store.root)


def test_who_may_only_look_cannot_hold_a_lock_and_sees_who_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that all may read, as older versions made them."""
    store = Store(tmp_path / "store")
    store.enter(mode=0o755)
    path = store.lock("collector")
    path.parent.mkdir()
    path.touch(0o644)
    held = hold(path)
    assert held is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert is_held(path)

    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as other_user:
        other_user.setattr(os, "open", forbidden)
        assert is_held(path)
        held.release()
        assert not is_held(path)


@pytest.mark.parametrize("name", ["/etc/{}", "../{}", "sealed/s/../../{}", "sealed/r/{}", "spool/{}", "sealed/s/.{}", "{}"])
@pytest.mark.parametrize("kind", ["sealed", "published"])
def test_a_manifest_names_only_files_of_its_store(kind: str, name: str, store: Store, tmp_path: Path) -> None:
    victim = tmp_path / "precious.parquet"
    duckdb.sql("select 1 as one").write_parquet(str(victim))
    manifest, file = load(store), name.format(victim.name)
    if kind == "sealed":
        bad = [msgspec.structs.replace(one, run="s", file=file, last_at_us=1, replaces=()) for one in manifest.sealed[:1]]
        wrong = msgspec.structs.replace(manifest, sealed=(*bad, *manifest.sealed[1:]))
    else:
        entry = PublishedFile(name="rollups", file=file, rows=1, sha256="", code="", covers={})
        wrong = msgspec.structs.replace(manifest, published=(entry,))
    publish(store, wrong)
    with pytest.raises(StoreError, match="is not a manifest"):
        prune_older(store, 2**60)
    assert victim.exists()


def test_a_manifest_leads_to_no_spool_file_elsewhere(store: Store) -> None:
    manifest = load(store)
    outside = SealedSpool(writer="..", segment=0, bytes=0, rows=0, last_seq=0)
    one: SealedFile = msgspec.structs.replace(manifest.sealed[0], replaces=(outside,))
    publish(store, msgspec.structs.replace(manifest, sealed=(one, *manifest.sealed[1:])))
    with pytest.raises(StoreError, match=r"writer '\.\.' is not allowed"):
        load(store)


@pytest.mark.parametrize("place", ["manifest.new", "collector.log", "sealed/elsewhere", "spool/s/w", "locks/collector"])
def test_who_writes_a_store_follows_no_link_in_it(place: str, store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "000000.parquet").touch()
    link = store.root / place
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    with pytest.raises(StoreError, match=f"{place} is a link"), maintaining(store):
        raise AssertionError
    with pytest.raises(StoreError, match=f"{place} is a link"):
        store.enter()
    assert [one.name for one in outside.iterdir()] == ["000000.parquet"]


def test_a_linked_folder_of_sealed_files_is_not_read(store: Store, tmp_path: Path) -> None:
    (store.root / "sealed" / "r").rename(tmp_path / "elsewhere")
    (store.root / "sealed" / "r").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link"):
        load(store)


def test_a_fifo_in_the_place_of_a_lock_or_manifest_makes_nobody_wait(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.enter()
    os.mkfifo(store.manifest)
    with pytest.raises(StoreError, match="is not a manifest"):
        load(store)
    store.lock("collector").parent.mkdir()
    os.mkfifo(store.lock("collector"))
    assert not is_held(store.lock("collector"))
    with pytest.raises(OSError, match="not a regular file"):
        hold(store.lock("collector"))


def test_a_fifo_in_the_place_of_a_log_makes_nobody_wait(store: Store) -> None:
    for writer, make in (("w", os.mkfifo), ("v", os.mkdir)):
        (folder := store.spool("evil") / writer).mkdir(parents=True)
        make(folder / segment_name(0))
    os.mkfifo(store.trouble)
    with open_store(store) as reader:
        assert reader.sql("select count(*) as n from events where run = 'evil'")["n"].to_list() == [0]
    assert trouble(store) is None
    with pytest.raises(StoreError, match="is neither a file nor a folder"):
        store.enter()
    sealed = store.root / load(store).sealed[0].file
    sealed.unlink()
    os.mkfifo(sealed)
    publish(store, load(store))
    with pytest.raises(StoreError, match="is not a regular file"):
        load(store)


def test_a_link_in_the_place_of_a_lock_keeps_nobody_from_looking(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.enter()
    (locks := store.lock("x").parent).mkdir()
    (locks / "controller-r").symlink_to(tmp_path)
    assert living_runs(store) == []
