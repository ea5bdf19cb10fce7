"""store.duckdb, as its owner opens it: live, in a store that was moved or copied, beside another, in older DuckDBs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pytest
from support.store.filled_store import collect, decide, fill
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.events import Span
from unskew.collector.files.manifest import load
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.read.views import EXECUTED, VIEWS
from unskew.collector.service import process, showing
from unskew.collector.service.collecting import Collector
from unskew.collector.service.showing import Showing
from unskew.collector.service.snapshot import write_snapshot
from unskew.collector.write.commands import hold_controller_lock
from unskew.collector.write.spool import SpoolWriter

OTHER_DUCKDBS = [path for path in os.environ.get("UNSKEW_OTHER_DUCKDBS", "").split(os.pathsep) if path]
"""Interpreters that have another version of DuckDB and need nothing else."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def sealed(store: Store, count: int) -> None:
    fill(store, "r", "rank-0000.1", count)
    decide(store, "r", "controller.1")
    collect(store)


@contextmanager
def opened(store: Store, folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """store.duckdb, by one whose working directory is `folder`."""
    with pytest.MonkeyPatch.context() as patch, duckdb.connect(str(store.database), read_only=True) as database:
        patch.chdir(folder)
        yield database


def spans(database: duckdb.DuckDBPyConnection) -> int:
    ((count,),) = database.sql("select count(*) from spans").fetchall()
    return int(count)


@pytest.mark.slow
def test_it_is_there_at_once_and_follows_the_run(store: Store) -> None:
    writer, follower = SpoolWriter(store, "r", "rank-0000.1"), Showing(store)

    def write(count: int) -> None:
        for number in range(count):
            writer.append(
                Span(kind="B", device="d", rank=0, plan_version=0, attempt=0, iteration=0, start_us=number, wall_us=7)
            )
        assert writer.hand_over(30.0)

    with hold_controller_lock(store, "r"):
        write(7)
        follower.look()
        with opened(store, store.root) as held:
            assert spans(held) == 7
            # Somebody else writes into it, which DuckDB's own shell may do at any time, and leaves without a farewell.
            code = "import duckdb, os, sys; c = duckdb.connect(sys.argv[1]); c.execute('create table mine(a int)'); os._exit(0)"
            held.close()
            subprocess.run([sys.executable, "-c", code, str(store.database)], check=True)
        write(5)
        follower.look()
        with opened(store, store.root) as now:
            assert spans(now) == 12
            assert now.sql("select count(*) from duckdb_tables() where table_name = 'mine'").fetchall() == [(0,)]
        before = store.database.stat().st_ino
        follower.look()
        assert store.database.stat().st_ino == before, "nothing came in"
    writer.close(30.0)


def test_it_takes_a_bounded_share_of_a_core(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    spent_s = [0.0]
    monkeypatch.setattr("unskew.collector.service.showing.time.thread_time", lambda: spent_s[0])
    monkeypatch.setattr(showing, "write_snapshot", lambda *_: spent_s.__setitem__(0, spent_s[0] + 5.0))
    fill(store, "r", "rank-0000.1", 9)
    assert Showing(store).look() == 5.0 / showing.SNAPSHOT_SHARE


def test_a_merge_that_takes_long_does_not_make_it_old(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    merging, over, wait = threading.Event(), threading.Event(), process.signal.sigtimedwait

    def merge(*_: object, **__: object) -> bool:
        merging.set()
        return over.wait(50.0)

    def new(store: Store) -> int:
        with opened(store, store.root) as now:
            return spans(now)

    monkeypatch.setattr(showing, "SNAPSHOT_S", 0.01)
    monkeypatch.setattr(showing, "SNAPSHOT_SHARE", 1e9)
    monkeypatch.setattr(process, "STEP_S", 0.01)
    monkeypatch.setattr(process, "lower_priority", lambda **_: None)
    monkeypatch.setattr(showing, "lower_priority", lambda **_: None)
    monkeypatch.setattr(process.signal, "sigtimedwait", lambda *_: wait([], 0.01) or (over.is_set() or None))
    with hold_controller_lock(store, "r"):
        fill(store, "r", "rank-0000.1", 7)
        serving = threading.Thread(target=process.serve, args=(store, 0.1))
        serving.start()
        assert until(store.database.exists)
        monkeypatch.setattr(Collector, "_compact", merge)
        assert merging.wait(50.0)
        fill(store, "r", "rank-0001.1", 5)
        seen = until(lambda: new(store) == 12)
        over.set()
    serving.join()
    assert seen


def until(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 40.0
    while not (holds := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return holds


@pytest.mark.slow
def test_who_holds_it_open_goes_on_while_files_are_replaced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed(store, 200)
    collector, follower = Collector(store), Showing(store)
    monkeypatch.chdir(store.root)
    os.link("store.duckdb", "held.duckdb")  # under its own name this process would get the same database twice
    with duckdb.connect("held.duckdb", read_only=True) as held:
        before = spans(held), held.sql("from rollups order by all").fetchall()
        for number in range(3):
            fill(store, f"r{number}", "rank-0000.1", 100)
            while collector.step():
                follower.look()
        assert (spans(held), held.sql("from rollups order by all").fetchall()) == before
    with opened(store, store.root) as now:
        assert spans(now) == 500
    collector.close()


def test_what_a_killed_collector_merged_and_store_duckdb_still_read_goes_with_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unskew.collector.service.sealing.SEAL_BYTES", 1)
    monkeypatch.setattr("unskew.collector.service.compaction.SMALL_ROWS", 150)
    killed = Collector(store)
    with hold_controller_lock(store, "r"):
        for incarnation in range(2):
            fill(store, "r", f"rank-0000.{incarnation}", 100)
            killed.step()
        Showing(store).look()
        killed.step()
    killed._abandon()
    (merged,) = load(store).sealed
    assert len([*store.sealed("r").iterdir()]) == 3
    following = Collector(store)
    following.step()
    following.close()
    assert [*store.sealed("r").iterdir()] == [store.root / merged.file]


KILLED = "import duckdb, os, sys; held = duckdb.connect(sys.argv[1]); held.execute('create table made (i int)'); os._exit(9)"


def test_what_a_killed_collector_left_half_written_is_no_part_of_the_next(store: Store) -> None:
    sealed(store, 7)
    half = store.database.with_suffix(".new")
    assert subprocess.run([sys.executable, "-c", KILLED, half], check=False).returncode == 9
    assert half.with_name("store.new.wal").exists()
    write_snapshot(store)
    with opened(store, store.root) as database:
        assert spans(database) == 7
    assert not [*store.root.glob("store.new*")]


def test_a_store_that_was_moved_or_copied_is_read_where_it_is(store: Store, tmp_path: Path) -> None:
    sealed(store, 100)
    copy, moved = Store(tmp_path / "copy, of it"), Store(tmp_path / "it's moved")
    shutil.copytree(store.root, copy.root)
    store.root.rename(moved.root)
    for there in (moved, copy):
        with opened(there, there.root) as database:
            assert spans(database) == 100
        with opened(there, tmp_path) as database:
            database.execute("set variable store = ?", [str(there.root)])
            assert spans(database) == 100


@pytest.mark.slow
def test_elsewhere_or_beside_another_store_it_says_where_to_start(store: Store, tmp_path: Path) -> None:
    sealed(store, 100)
    other, copy = Store(tmp_path / "other"), Store(tmp_path / "copy")
    sealed(other, 33)
    shutil.copytree(store.root, copy.root)
    fill(copy, "r2", "rank-0000.1", 5)
    collect(copy)  # from here on the two may hold different files of one name
    assert (copy.root / "sealed/r").is_dir()
    for folder in (tmp_path, other.root, copy.root):
        with opened(store, folder) as database:
            for view in ("spans", "verdicts", "rollups", "runs", "events"):
                with pytest.raises(duckdb.IOException, match=r"start-duckdb-in-this-store-\w+\.\d+/\.\./(sealed|published)/"):
                    database.sql(f"select count(*) from {view}").fetchall()
    with opened(copy, copy.root) as database:
        assert spans(database) == 105


@pytest.mark.slow
def test_it_can_be_attached_to_another_database(store: Store) -> None:
    sealed(store, 100)
    with duckdb.connect() as mine:
        mine.execute(f"attach '{store.database}' as log (read_only)")
        mine.execute("set variable store = ?", [str(store.root)])
        for view in VIEWS:
            mine.sql(f"select * from log.{view}").fetchall()


@pytest.mark.slow
def test_a_copy_in_one_file_answers_anywhere_as_the_store_does(store: Store, tmp_path: Path) -> None:
    sealed(store, 100)
    fill(store, "open", "rank-0000.1", 40)  # not sealed yet
    whole, one = tmp_path / "whole.duckdb", tmp_path / "one.duckdb"
    beside = tmp_path / "whole.duckdb.new"
    beside.touch()
    runner = CliRunner()
    for arguments in ([str(whole)], [str(one), "--run", "open"]):
        answer = runner.invoke(app, ["store", "duckdb", *arguments, "--store", str(store.root)])
        assert answer.exit_code == 0, answer.output
    for out, sentence in ((whole, "exists"), (store.root / "trouble", "lies in the store")):
        refused = runner.invoke(app, ["store", "duckdb", str(out), "--store", str(store.root)])
        assert (refused.exit_code, sentence in refused.output, out.name == "trouble") == (2, True, not out.exists())
    assert beside.exists(), "no file of anybody's is taken for one of ours"
    with open_store(store) as reader:
        expected = {view: reader.duckdb(f"from {view} order by all").fetchall() for view in VIEWS}
    shutil.rmtree(store.root)
    with duckdb.connect(str(whole), read_only=True) as database:
        assert {view: database.sql(f"from {view} order by all").fetchall() for view in VIEWS} == expected
    with duckdb.connect(str(one), read_only=True) as database:
        assert database.sql("select run, count(*) from spans group by run").fetchall() == [("open", 40)]
        assert database.sql("select distinct run from writers").fetchall() == [("open",)]


def test_the_views_use_no_word_that_older_duckdbs_cannot_read_back() -> None:
    """What DuckDB 2 stores of `if(...)` is a function to those before it, and there is none of that name."""
    assert [name for name, query in [*VIEWS.items(), ("executed", EXECUTED)] if re.search(r"\bif\(", query)] == []


@pytest.mark.skipif(not OTHER_DUCKDBS, reason="UNSKEW_OTHER_DUCKDBS names no interpreter with another DuckDB")
@pytest.mark.parametrize("python", OTHER_DUCKDBS)
def test_other_versions_of_duckdb_open_it(store: Store, tmp_path: Path, python: str) -> None:
    sealed(store, 100)
    copy = tmp_path / "copy.duckdb"
    assert CliRunner().invoke(app, ["store", "duckdb", str(copy), "--store", str(store.root)]).exit_code == 0
    code = (
        "import duckdb, sys\n"
        "database = duckdb.connect(sys.argv[1], read_only=True)\n"
        f"counts = [database.execute(f'select count(*) from {{view}}').fetchall()[0][0] for view in {list(VIEWS)}]\n"
        "print(duckdb.__version__, counts)"
    )
    with open_store(store) as reader:
        expected = [reader.duckdb(f"select count(*) from {view}").fetchall()[0][0] for view in VIEWS]
    for file, folder in ((store.database, store.root), (copy, tmp_path)):
        answer = subprocess.run([python, "-c", code, str(file)], cwd=folder, check=True, capture_output=True, text=True)
        version, _, counts = answer.stdout.partition(" ")
        assert (version != duckdb.__version__, counts) == (True, f"{expected}\n")
