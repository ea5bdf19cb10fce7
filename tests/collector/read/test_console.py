"""SQL for people reads the views and can do nothing else. Each refused query got through some weaker guard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pytest

from unskew.collector.events import Note
from unskew.collector.paths import Store
from unskew.collector.read.console import ConsoleError, ask, locked, query
from unskew.collector.read.on_demand import ViewsOnDemand
from unskew.collector.service.ingest import working_database
from unskew.collector.service.sealing import seal
from unskew.collector.write.control_stream import ControlStream


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One sealed event and one in a spool file."""
    store = Store(tmp_path_factory.mktemp("store"))
    for number in (0, 1):
        stream = ControlStream(store, "r", "control", f"controller.{number}")
        stream.append(number, [Note(text=f"note {number}", by="ada")], actor="c")
        stream.close()
        if number == 0:
            with contextlib.closing(working_database(store)) as database:
                assert seal(store, database, "r") == 1
    return store


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_views_answer_over_sealed_and_spooled_rows(store: Store) -> None:
    frame = query(store, "select version, payload->>'text' as text from events order by version")
    assert frame.rows() == [(1, "note 0"), (2, "note 1")]
    assert query(store, "select unnest(range(100))", row_limit=7).height == 7
    assert "events" in query(store, "show tables")["name"].to_list()


def test_types_that_tables_lack_come_as_text(store: Store) -> None:
    texts = {
        "max(make_timestamp(at_us)) - max(make_timestamp(at_us))": "00:00:00",
        "any_value([interval 2 days])": "[2 days]",
        "any_value(union_value(a := 1))": "1",
        "any_value(2::bignum)": "2",
        "any_value(340282366920938463463374607431768211455::uhugeint)": "340282366920938463463374607431768211455",
        "any_value('12:00:00+02'::timetz)": "12:00:00+02",
        "any_value(1::variant)": "1",
    }
    asked = ", ".join(f"{what} as c{number}" for number, what in enumerate(texts))
    assert query(store, f"select {asked} from events").rows() == [tuple(texts.values())]


@pytest.mark.slow
def test_columns_of_one_name_are_told_apart(store: Store) -> None:
    frame = query(store, "select one.type, * from events one join events two using (version) order by version", row_limit=None)
    assert frame.columns[:2] == ["type", "run"]
    assert {"run_1", "type_1", "type_2"} <= set(frame.columns)
    assert frame.height == 2


NOTHING_ELSE, ONE_QUERY = "nothing else", "one query"
ATTACKS: dict[str, str | None] = {
    "with x as (copy (select 1) to '{out}') select 1": NOTHING_ELSE,
    "with x as (copy (select 1) to '{sealed}') select 1": NOTHING_ELSE,
    "explain analyze copy (select 1) to '{out}'": NOTHING_ELSE,
    "copy (select 1) to '{out}'": ONE_QUERY,
    "export database '{out}'": ONE_QUERY,
    "import database '{out}'": ONE_QUERY,
    "select * from read_parquet('{sealed}')": NOTHING_ELSE,
    "select * from '{sealed}'": NOTHING_ELSE,
    "select * from read_text('/etc/passwd')": NOTHING_ELSE,
    "select * from read_blob('/etc/passwd')": NOTHING_ELSE,
    "select * from read_csv('/etc/passwd')": NOTHING_ELSE,
    "select * from read_json('{store}/manifest.json')": NOTHING_ELSE,
    "select * from sniff_csv('/etc/passwd')": NOTHING_ELSE,
    "select * from glob('/etc/*')": NOTHING_ELSE,
    "select * from parquet_metadata('{sealed}')": NOTHING_ELSE,
    "from query('select * from read_text(''/etc/passwd'')')": NOTHING_ELSE,
    "from query_table('{sealed}')": None,
    "select * from json_execute_serialized_sql(json_serialize_sql('select * from read_text(''/etc/passwd'')'))": NOTHING_ELSE,
    "select 1; attach 'x.db'": ONE_QUERY,
    "attach '{out}'": ONE_QUERY,
    "explain analyze attach '{out}'": None,
    "set enable_external_access = true": ONE_QUERY,
    "explain analyze set memory_limit = '9GB'": None,
    "reset lock_configuration": ONE_QUERY,
    "connect 'quack:localhost'": ONE_QUERY,
    "pragma enable_logging": ONE_QUERY,
    "call enable_logging(storage := 'file', storage_config := {{'path': '{out}'}})": ONE_QUERY,
    "from enable_logging(storage := 'file', storage_config := {{'path': '{out}'}})": None,
    "from enable_profiling(save_location := '{out}')": None,
    "install httpfs": ONE_QUERY,
    "load '{out}'": ONE_QUERY,
    "create secret (type s3, key_id 'a')": ONE_QUERY,
    "create table t as select 1": ONE_QUERY,
    "drop view log": ONE_QUERY,
    "with x as (insert into stored_open select * from stored_open) select 1": None,
    "with x as (delete from log) select 1": None,
    "select * from request": "there is no view request",
    "select * from sys": "there is no view sys",
    "select getenv('HOME')": None,
    "selec 1": "syntax error",
}


@pytest.fixture(scope="module")
def views(store: Store) -> Iterator[ViewsOnDemand]:
    views = locked(str(store.root))
    with views.connection:
        yield views


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_gets_out(
    store: Store, views: ViewsOnDemand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    """By the settings alone: the child's limits are a wall of their own."""
    monkeypatch.chdir(tmp_path)
    before = contents(store.root)
    sql = attack.format(out=tmp_path / "out", sealed=next(store.sealed("r").iterdir()), store=store.root)
    with pytest.raises(ConsoleError, match=ATTACKS[attack]) as refused:
        ask(views, sql, pyarrow.RecordBatchReader.read_all)
    assert "\n" not in str(refused.value)
    assert contents(store.root) == before
    assert not list(tmp_path.iterdir())
    assert ask(views, "select count(*) as n from events", lambda rows: rows.read_all().to_pylist()) == [{"n": 2}]


@pytest.mark.slow
def test_the_child_refuses_alike_and_bounds_memory(store: Store) -> None:
    with pytest.raises(ConsoleError, match="nothing else"):
        query(store, "select * from read_text('/etc/passwd')")
    with pytest.raises(ConsoleError, match=r"more than 600 MB of memory"):
        query(store, "select list(range) from range(300000000)")


@pytest.mark.slow
@pytest.mark.limit(120)
def test_what_duckdb_does_not_count_is_bounded_too(store: Store) -> None:
    with pytest.raises(ConsoleError, match=r"more than 600 MB of memory"):
        query(store, "select repeat('x', 2500000000)")
    with pytest.raises(ConsoleError, match=r"the answer is larger than 250 MB"):
        query(store, "select repeat('x', 1000) from range(2000000)", row_limit=None)


def test_a_complaint_in_the_middle_of_the_answer_leaves_no_part_of_it(store: Store) -> None:
    with pytest.raises(ConsoleError, match=r"^Invalid Input Error: enough$"):
        query(store, "select if(range = 2000000, error('enough'), range) from range(3000000)", row_limit=None)


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "sql",
    [
        "select count(*) from range(1000000) a, range(1000000) b where a.range * b.range % 7 = 3",
        "select levenshtein(repeat('a', 200000), repeat('b', 200000))",
    ],
)
def test_no_query_runs_for_ever(store: Store, sql: str) -> None:
    with pytest.raises(ConsoleError, match="was stopped after"):
        query(store, sql, timeout_s=0.5)
