"""`unskew store`: a byte that changes an answer is noticed; rebuild, compaction, retention and kills of them keep answers."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import msgspec
import polars
import pytest
from support.store.filled_store import collect, decide, fill
from support.training.warm_processes import warm_process
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.files.manifest import load
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.read.views import VIEWS
from unskew.collector.service import compaction
from unskew.collector.service.check import check
from unskew.collector.service.collecting import compact_all, prune_older
from unskew.collector.service.rebuild import rebuild
from unskew.collector.write.commands import hold_controller_lock

pytestmark = [pytest.mark.limit(240), pytest.mark.slow]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run that is over and sealed, and one that is not: its files lie in the spool."""
    store = Store(tmp_path_factory.mktemp("filled") / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "due", lambda *_, **__: iter(()))
        for number in range(2):
            fill(store, "over", f"rank-0000.{number}", 300)
            decide(store, "over", f"controller.{number}")
            collect(store)
    with hold_controller_lock(store, "on"):
        fill(store, "on", "rank-0000.1", 200)
        decide(store, "on", "controller.1")
    return store


@pytest.fixture
def store(filled: Store, tmp_path: Path) -> Store:
    shutil.copytree(filled.root, tmp_path / "store")
    return Store(tmp_path / "store")


def answers(store: Store) -> list[polars.DataFrame] | str:
    """What every view says, or that it cannot be asked."""
    try:
        with open_store(store) as reader:
            frames = [reader.sql(f"select * from {view}") for view in VIEWS if view != "events"]
            return [*frames, reader.sql("select run, writer, seq, at_us, type, payload from events")]
    except (StoreError, duckdb.Error, OSError, UnicodeDecodeError, polars.exceptions.PolarsError) as error:
        return f"{type(error).__name__}"


def same(one: list[polars.DataFrame] | str, other: list[polars.DataFrame] | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return False
    pairs = zip(one, other, strict=True)
    return all(sorted(map(str, a.rows())) == sorted(map(str, b.rows())) for a, b in pairs)


def flippable(store: Store) -> Iterator[Path]:
    for path in sorted(store.root.rglob("*")):
        if path.is_file() and path.stat().st_size and not path.is_relative_to(store.root / "locks"):
            yield path


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_byte_that_changes_an_answer_is_noticed(store: Store, seed: int) -> None:
    truth, chance = answers(store), random.Random(seed)
    assert check(store, mend=False).findings == ()
    for path in flippable(store):
        whole = path.read_bytes()
        at = chance.randrange(len(whole))
        path.chmod(0o644)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
        try:
            noticed = not check(store, mend=False).well
        except StoreError:  # the manifest
            noticed = True
        assert noticed or same(answers(store), truth), f"byte {at} of {path}"
        path.write_bytes(whole)


def test_what_is_made_of_the_log_is_mended_and_the_rest_is_named(store: Store) -> None:
    truth = answers(store)
    for path in (store.root / "published").iterdir():
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-9] + b"012345678")
    (store.root / "sealed" / "over" / "000009-telemetry.new").write_bytes(b"half")
    result = CliRunner().invoke(app, ["store", "check", "--store", str(store.root), "--json", str(store.root / "said.json")])
    assert result.exit_code == 0, result.output
    answer = msgspec.json.decode((store.root / "said.json").read_bytes())
    assert answer["well"] is True
    assert len(answer["findings"]) == result.output.count("mended: ") > 1
    assert same(answers(store), truth)
    assert check(store, mend=False).findings == ()

    sealed = store.root / load(store).sealed[0].file
    sealed.chmod(0o644)
    sealed.write_bytes(sealed.read_bytes()[:-9] + b"012345678")
    result = CliRunner().invoke(app, ["store", "check", "--store", str(store.root)])
    assert result.exit_code == 1
    assert f"found: run over: {load(store).sealed[0].file}" in result.output


def test_rebuild_answers_as_before_and_says_so_of_every_view(store: Store) -> None:
    truth = answers(store)
    store.database.unlink()
    shutil.rmtree(store.root / "published")
    check(store, mend=True)
    rebuilt = rebuild(store)
    assert rebuilt.different == ()
    assert set(rebuilt.after) == set(VIEWS)
    assert rebuilt.after["events"][0] == 300 * 2 + 2 + 6 + 200 + 1 + 3
    assert same(answers(store), truth)


def test_compaction_and_retention_keep_what_they_must(store: Store) -> None:
    truth = answers(store)
    assert compact_all(store) == (4, 2)
    assert same(answers(store), truth)
    assert check(store, mend=False).findings == ()
    with open_store(store) as reader:
        rollups = reader.sql("select * from rollups order by all")
    dropped = prune_older(store, time.time_ns() // 1000)
    assert [one.rows for one in dropped] == [602]
    assert check(store, mend=False).findings == ()
    with open_store(store) as reader:
        assert reader.sql("select count(*) from spans where run = 'over'").item() == 0
        assert reader.sql("select count(*) from events where run = 'over' and type = 'note@1'").item() == 6
        assert reader.sql("select * from rollups order by all").equals(rollups), "they outlive what they were made of"
    assert rebuild(store).different == ()


def test_maintenance_that_is_killed_anywhere_changes_no_answer(filled: Store, tmp_path: Path) -> None:
    truth, chance, killed = answers(filled), random.Random(3), 0
    for number in range(3):
        store = Store(tmp_path / f"store-{number}")
        shutil.copytree(filled.root, store.root)
        for work in ("compact", "rebuild"):
            child = warm_process().start_command("store", work, "--store", str(store.root))
            time.sleep(chance.uniform(0.1, 1.5))
            child.kill()
            killed += child.wait() == -signal.SIGKILL
            assert same(answers(store), truth)
        assert check(store, mend=True).well
        assert same(answers(store), truth)
    assert killed > 1


def test_a_collector_makes_way_for_maintenance_and_comes_back(store: Store) -> None:
    collecting = [sys.executable, "-m", "unskew.collector.service.process", "--store", str(store.root), "--idle-s", "60"]
    with hold_controller_lock(store, "on"), subprocess.Popen(collecting) as collector:
        time.sleep(1.0)
        result = CliRunner().invoke(app, ["store", "check", "--store", str(store.root)])
        assert result.exit_code == 0, result.output
        assert collector.wait(30.0) == 0


def test_bad_usage_is_one_sentence(tmp_path: Path) -> None:
    for work in (["check"], ["rebuild"], ["compact"], ["prune", "--telemetry-days", "1"]):
        result = CliRunner().invoke(app, ["store", *work, "--store", str(tmp_path / "none")])
        assert (result.exit_code, result.stderr) == (2, f"there is no store in {tmp_path / 'none'}\n")
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / "manifest.json").write_text("{")
        result = CliRunner().invoke(app, ["store", *work, "--store", str(tmp_path / "broken")])
        assert (result.exit_code, "is not a manifest" in result.stderr) == (2, True), work


def test_a_truncated_file_is_named_in_one_sentence_by_every_command_that_needs_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, "r", "rank-0001.1", 100)
    decide(store, "r", "controller.1")
    collect(store)
    damaged = next(store.root / sealed.file for sealed in load(store).sealed if sealed.kind == "telemetry")
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:600])
    for command in (["replay", "r"], ["diagnose", "r"], ["sql", "from spans"], ["store", "rebuild"]):
        ended = CliRunner().invoke(app, [*command, "--store", str(store.root)])
        assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1), command
        assert str(damaged) in ended.stderr, command
        assert "unskew store check" in ended.stderr, command
