"""Projections say what the raw log says: however the log is cut, sealed, published, merged, rebuilt or pruned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import duckdb
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unskew.collector import events as ev
from unskew.collector import projections
from unskew.collector.files import manifest, rows
from unskew.collector.files.manifest import Manifest, PrunedRange
from unskew.collector.files.segment import control_line, telemetry_line
from unskew.collector.files.tail import SpoolLines
from unskew.collector.paths import Store
from unskew.collector.projections import publishing
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.projections.published import published_state, tiers_of
from unskew.collector.read.reader import open_store
from unskew.collector.read.views import VIEWS
from unskew.collector.service.ingest import working_database
from unskew.collector.service.sealing import seal
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

few = st.integers(0, 3)
maybe_us = st.none() | st.integers(0, 1000)
spans = st.builds(
    ev.Span, kind=st.sampled_from(["F", "B", "send"]), device=st.just("d"), rank=few, plan_version=few, attempt=few,
    iteration=st.integers(0, 25), start_us=st.integers(0, 10**9), wall_us=st.integers(0, 10**6), compute_us=maybe_us,
    wait_pp_us=maybe_us, bytes=maybe_us,
)  # fmt: skip
committed = st.builds(
    ev.IterationCommitted, iteration=few, plan_version=few, attempt=few, rank=few, loss=st.floats(0, 9), tokens=few,
    start_us=st.just(0), wall_us=st.integers(0, 1000), log_complete=st.booleans(),
)  # fmt: skip
ratios = st.builds(
    ev.RankRatio, rank=few, measured_us=st.integers(1, 99), healthy_us=st.integers(1, 99), f=st.none() | st.floats(0, 2)
)
judged = st.builds(
    ev.IterationJudged, iteration=few, plan_version=few, measured_us=st.integers(0, 99), predicted_us=maybe_us,
    ranks=st.lists(ratios, max_size=2).map(tuple),
)  # fmt: skip
beats = st.builds(
    ev.Heartbeat, rank=few, pid=few, iteration=few, progress=few, activity=st.sampled_from(["compute", "wait"]),
    age_us=st.integers(0, 99), stalled_us=few, waits_for=st.none() | few,
)  # fmt: skip
telemetry = st.one_of(
    spans,
    committed,
    judged,
    beats,
    st.builds(ev.Dropped, count=few),
    st.builds(ev.IterationTimed, iteration=few, wall_us=few, attempt=few),
)
notes = st.builds(ev.Note, text=st.text(max_size=3), by=st.just("ada"))
entries = st.tuples(st.sampled_from(["r", "s"]), st.sampled_from(["w", "x"]), st.integers(0, 9), telemetry | notes)


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    """Tables `whole` and `part0` to `part3`: what was written to segment 0 to 3."""
    with duckdb.connect(":memory:") as connection:
        rows.create_table(connection, "whole")
        for part in range(4):
            connection.execute(f"create view part{part} as select * from whole where segment = {part}").fetchall()
        yield connection


@pytest.mark.slow
@pytest.mark.limit(120)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(log=st.lists(st.tuples(few, entries), max_size=12))
def test_a_log_cut_anywhere_and_merged_in_two_steps_gives_the_projection_of_the_whole(
    connection: duckdb.DuckDBPyConnection, log: list[tuple[int, tuple[str, str, int, ev.Event]]]
) -> None:
    seq, lines = count(1), defaultdict[str, list[SpoolLines]](list)
    for part, (run, writer, at_us, event) in log:
        number = next(seq)
        control = isinstance(event, ev.Control)
        line = control_line(at_us, "c", number, "me", event) if control else telemetry_line(number, at_us, event)
        lines[run].append(SpoolLines(writer, part, line))
    connection.execute("delete from whole").fetchall()
    for run, found in lines.items():
        rows.insert(connection, "whole", run, found)
    for name, one in PROJECTIONS.items():
        older = one.merge(f"({one.partial('part0')} union all by name {one.partial('part1')})")
        newer = one.merge(f"({one.partial('part2')} union all by name {one.partial('part3')})")
        merged = one.merge(f"({older} union all by name {newer})")
        columns, rows_of_whole = all_rows(connection, one.merge(f"({one.partial('whole')})"))
        assert all_rows(connection, f"select {', '.join(columns)} from ({merged})") == (columns, rows_of_whole), name


def all_rows(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[list[str], list[str]]:
    """The columns and, in any order, the rows."""
    answer = connection.execute(query)
    return [column[0] for column in answer.description or ()], sorted(map(repr, answer.fetchall()))


class Run:
    """A run that is sealed bit by bit while it goes on."""

    def __init__(self, store: Store) -> None:
        self.store, self.database, self.iteration, self.incarnation = store, working_database(store), 0, 0

    def go_on(self, name: str, iterations: int) -> None:
        """`iterations` more of run `name`, whose writers end."""
        self.incarnation += 1
        stream = ControlStream(self.store, name, "control", f"controller.{self.incarnation}")
        stream.append(stream.version, [ev.Note(text=f"{self.iteration}", by="ada")], actor="c")
        stream.close()
        writer = SpoolWriter(self.store, name, f"rank-0000.{self.incarnation}")
        for _ in range(iterations):
            for kind in ("F", "B"):
                writer.append(
                    ev.Span(
                        kind=kind,
                        device="d",
                        rank=0,
                        plan_version=0,
                        attempt=0,
                        iteration=self.iteration,
                        start_us=0,
                        wall_us=7,
                    )
                )
            writer.append(
                ev.IterationCommitted(
                    iteration=self.iteration,
                    plan_version=0,
                    attempt=0,
                    rank=0,
                    loss=1.0,
                    tokens=5,
                    start_us=0,
                    wall_us=9,
                    log_complete=True,
                )
            )
            self.iteration += 1
        assert writer.close(10.0)

    def seal(self, name: str) -> None:
        assert seal(self.store, self.database, name)

    def publish(self) -> None:
        now = manifest.load(self.store)
        self.swap(now, published=projections.publish(self.database, self.store, now))

    def swap(self, now: Manifest, **changes: object) -> None:
        manifest.publish(self.store, msgspec.structs.replace(now, number=now.number + 1, **changes))


def answers(store: Store, *views: str) -> dict[str, list[str]]:
    """The rows of these views, or of all."""
    with open_store(store) as reader:
        return {view: sorted(map(repr, reader.sql(f"select * from {view}").rows())) for view in views or VIEWS}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(Store(tmp_path))
    yield run
    run.database.close()


def raw(store: Store) -> dict[str, list[str]]:
    """The answers without any published file."""
    now = manifest.load(store)
    manifest.publish(store, msgspec.structs.replace(now, number=now.number + 1, published=()))
    found = answers(store)
    manifest.publish(store, msgspec.structs.replace(now, number=now.number + 2))
    return found


@pytest.mark.slow
def test_every_view_is_equal_with_and_without_published_files_and_files_stay_few(run: Run) -> None:
    for number in range(7):
        run.go_on("r" if number % 3 else "s", iterations=8)
        run.seal("r" if number % 3 else "s")
        if number != 5:  # what is sealed and not yet published is added by the reader
            run.publish()
    run.go_on("r", iterations=3)  # and so is what is open
    assert answers(run.store) == raw(run.store)
    now = manifest.load(run.store)
    assert published_state(now).open == ()
    assert len(tiers_of(now)) < 7
    assert projections.check(run.database, run.store, now) == []


@pytest.mark.slow
def test_files_of_other_code_are_not_read_and_are_made_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.go_on("r", iterations=20)
    run.seal("r")
    monkeypatch.setattr(publishing, "CODE", "older")
    run.publish()
    now = manifest.load(run.store)
    assert {entry.code for entry in now.published} == {"older"}
    assert published_state(now).tiers == ()
    truth = raw(run.store)
    assert answers(run.store) == truth
    monkeypatch.undo()
    run.publish()
    assert published_state(manifest.load(run.store)).open == ()
    assert answers(run.store) == truth


@pytest.mark.slow
def test_rollups_outlive_the_telemetry_that_retention_drops_also_when_the_code_changes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.go_on("r", iterations=20)
    run.seal("r")
    run.publish()
    kept = ("rollups", "iterations")
    before = answers(run.store, *kept)
    now = manifest.load(run.store)
    gone = [one for one in now.sealed if one.kind != "control"]
    pruned = tuple(
        PrunedRange(run="r", first=one.first, last=one.last, rows=one.rows, last_pos=one.last_pos, last_at_us=one.last_at_us)
        for one in gone
    )
    run.swap(now, sealed=tuple(one for one in now.sealed if one not in gone), pruned=pruned)
    assert answers(run.store, "rollups", "spans") == {"rollups": before["rollups"], "spans": []}
    monkeypatch.setattr(publishing, "CODE", "newer")
    monkeypatch.setattr("unskew.collector.projections.published.CODE", "newer")
    run.publish()
    assert {entry.code for entry in manifest.load(run.store).published} == {"newer"}
    assert answers(run.store, *kept) == before


@pytest.mark.slow
def test_check_names_a_damaged_file_and_rows_that_the_log_does_not_give(run: Run) -> None:
    run.go_on("r", iterations=20)
    run.seal("r")
    run.publish()
    now = manifest.load(run.store)
    entry = next(one for one in now.published if one.name == "rollups")
    path = run.store.root / entry.file
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (damage,) = projections.check(run.database, run.store, now)
    assert entry.file in damage
    run.swap(now, published=projections.rebuild(run.database, run.store, now))
    assert projections.check(run.database, run.store, manifest.load(run.store)) == []

    wrong = run.store.root / "published" / "999999-rollups.parquet"
    good = next(one for one in manifest.load(run.store).published if one.name == "rollups")
    run.database.execute(
        f"copy (select * replace (wall_us + 1 as wall_us) from read_parquet('{run.store.root / good.file}')) to '{wrong}'"
    ).fetchall()
    (run.store.root / good.file).chmod(0o644)
    wrong.replace(run.store.root / good.file)
    lied = msgspec.structs.replace(good, sha256=publishing._digest(run.store, good.file))
    now = manifest.load(run.store)
    now = msgspec.structs.replace(now, published=tuple(lied if one == good else one for one in now.published))
    (difference,) = projections.check(run.database, run.store, now)
    assert "projection rollups" in difference


@pytest.mark.slow
@pytest.mark.parametrize("types", [None, ["span@1"], ["note@1"], ["note@1", "iteration_committed@1"]])
@pytest.mark.parametrize("count_", [1, 5, 1000])
def test_the_newest_events_are_those_that_sorting_the_whole_log_gives(run: Run, count_: int, types: list[str] | None) -> None:
    for _ in range(2):
        run.go_on("r", iterations=6)
        run.seal("r")
    run.go_on("r", iterations=1)
    with open_store(run.store) as reader:
        found = reader.newest(count_, "r", types)
        asked = "true" if types is None else f"type in ({', '.join(map(rows.quoted, types))})"
        whole = reader.sql(f"select at_us, seq from events where run = 'r' and {asked} order by all desc limit {count_}")
        assert found.select("at_us", "seq").rows() == whole.rows()
        assert found.columns == reader.sql("select * from events limit 0").columns
        assert reader.newest(count_, "other").is_empty()
