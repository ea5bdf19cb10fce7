"""SQL for people reads the views and can do nothing else. Each refused query got through some weaker guard."""

from __future__ import annotations

from pathlib import Path

import pytest

from unskew.collector.console import ConsoleError, query
from unskew.collector.events import Note
from unskew.collector.ingest import Ingest
from unskew.collector.paths import Store
from unskew.collector.sealing import seal
from unskew.collector.spool import ControlStream


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One sealed event and one in a spool file."""
    store = Store(tmp_path_factory.mktemp("store"))
    for number in (0, 1):
        stream = ControlStream(store, "r", "control", f"controller.{number}")
        stream.append(number, [Note(text=f"note {number}", by="ada")], actor="c")
        stream.close()
        if number == 0:
            ingest = Ingest(store)
            ingest.step()
            assert seal(store, ingest, "r") == 1
            ingest.close()
    return store


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_views_answer_over_sealed_and_spooled_rows(store: Store) -> None:
    frame = query(store, "select version, payload->>'text' as text from events order by version")
    assert frame.rows() == [(1, "note 0"), (2, "note 1")]
    assert query(store, "select unnest(range(100))", row_limit=7).height == 7
    assert "events" in query(store, "show tables")["name"].to_list()


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("select max(make_timestamp(at_us)) - max(make_timestamp(at_us)) as d from events", "00:00:00"),
        ("select [interval 2 days] as d", "[2 days]"),
        ("select union_value(a := 1) as d", "1"),
        ("select 2::bignum as d", "2"),
    ],
)
def test_a_type_that_tables_lack_comes_as_text(store: Store, sql: str, text: str) -> None:
    assert query(store, sql).rows() == [(text,)]


@pytest.mark.limit(180)
def test_nothing_gets_out(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    sealed = next(store.sealed("r").iterdir())
    before = contents(store.root)
    forbidden = {
        f"with x as (copy (select 1) to '{out}') select 1": "nothing else",
        f"with x as (copy (select 1) to '{sealed}') select 1": "nothing else",
        f"explain analyze copy (select 1) to '{out}'": "nothing else",
        f"select * from read_parquet('{sealed}')": "nothing else",
        "select * from read_text('/etc/passwd')": "nothing else",
        "select * from request": "there is no view request",
        f"copy (select 1) to '{out}'": "one query",
        "select 1; attach 'x.db'": "one query",
        "set enable_external_access = true": "one query",
        "with x as (insert into hot select * from hot) select 1": "table",
        "selec 1": "syntax error",
    }
    for sql, reason in forbidden.items():
        with pytest.raises(ConsoleError, match=reason) as refused:
            query(store, sql)
        assert "\n" not in str(refused.value)
    assert contents(store.root) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "sql",
    [
        "select count(*) from range(100000000) a, range(100000000) b where a.range * b.range % 7 = 3",
        "select repeat('x', 3000000000)",
    ],
)
def test_no_query_runs_for_ever(store: Store, sql: str) -> None:
    with pytest.raises(ConsoleError, match="was stopped after"):
        query(store, sql, timeout_s=0.5)
