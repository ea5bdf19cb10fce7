"""Views that are defined when a query names them answer like views that were there before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from unskew.collector.files import rows
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.read.on_demand import ViewsOnDemand
from unskew.collector.read.reader import open_store
from unskew.collector.read.views import VIEWS, create_views

COUNT_VIEWS = "select count(*) from duckdb_views() where not internal"
PROJECTED = [f"projected.{name}" for name in PROJECTIONS]
NAMED_OTHERWISE = [
    'select * from "spans"',
    "SELECT * FROM SPANS",
    "from main.spans",
    "from memory.main.spans",
    "with chosen as (from spans) from chosen",
    "from query_table('spans')",
    "from query_table('sp' || 'ans')",
    "from query('from sp' || 'ans')",
    "describe spans",
    "desc spans",
    "summarize spans",
    "explain select * from spans",
    "select (select count(*) from spans)",
    'from "projected"."iterations"',
]
CATALOG = [
    "show tables",
    "from (show tables)",
    "show all tables",
    "describe",
    "select table_name from information_schema.tables",
    "select view_name from duckdb_views() where not internal",
    "select name from sqlite_master",
    "select relname from pg_catalog.pg_class",
]


def connected() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:")
    rows.create_table(connection, "log")
    return connection


@pytest.fixture
def views() -> Iterator[ViewsOnDemand]:
    with connected() as connection:
        yield ViewsOnDemand(connection)


@pytest.fixture(scope="module")
def whole() -> Iterator[duckdb.DuckDBPyConnection]:
    with connected() as connection:
        create_views(connection)
        yield connection


def defined(views: ViewsOnDemand) -> int:
    ((count,),) = views.connection.execute(COUNT_VIEWS).fetchall()
    return int(count)


@pytest.mark.slow
@pytest.mark.parametrize("query", [*(f"from {name}" for name in (*VIEWS, *PROJECTED)), *NAMED_OTHERWISE])
def test_a_query_finds_what_it_names(views: ViewsOnDemand, whole: duckdb.DuckDBPyConnection, query: str) -> None:
    found, expected = views.sql(query), whole.sql(query)
    assert (found.columns, found.types) == (expected.columns, expected.types)


def test_the_macro_finds_what_it_reads(views: ViewsOnDemand) -> None:
    with pytest.raises(duckdb.InvalidInputException, match="there is no run x"):
        views.sql("from executed('x')").fetchall()


def test_only_what_is_named_is_defined(views: ViewsOnDemand) -> None:
    views.sql("select 1").fetchall()
    views.sql("from log").fetchall()
    assert defined(views) == 0
    views.sql("from chunks").fetchall()
    assert defined(views) == len(("spans", "chunks"))
    views.sql("from (from rollups)").fetchall()
    assert defined(views) == len(("spans", "chunks", "rollups", "projected.rollups"))


@pytest.mark.slow
@pytest.mark.parametrize("query", CATALOG)
def test_the_catalog_lists_every_view(views: ViewsOnDemand, query: str) -> None:
    listed = {name for row in views.sql(query).fetchall() for name in row if isinstance(name, str)}
    assert listed >= VIEWS.keys()


def test_what_is_not_there_is_missed_among_all_views(views: ViewsOnDemand) -> None:
    with pytest.raises(duckdb.CatalogException, match=r"does not exist[^$]*spans"):
        views.sql("from spanz")
    assert defined(views) == len(VIEWS) + len(PROJECTIONS)


def test_a_relation_can_be_asked_about_any_view(tmp_path: Path) -> None:
    with open_store(tmp_path) as reader:
        relation = reader.duckdb("select 1 as n")
        assert relation.query("mine", "select n, run from mine left join runs on true").fetchall() == [(1, None)]


def test_views_follow_the_projections_that_were_changed(views: ViewsOnDemand) -> None:
    query = "select run, n_events from writers"
    assert views.sql(query).fetchall() == []
    published = "select 'r' as run, 'rank-0' as writer, 0 as rank, 7 as n_events, 0 as n_spans, 0 as n_dropped, 1 as first_us"
    views.project({"writers": f"{published}, 2 as last_us, 3 as last_iteration"}, "log")
    assert views.sql(query).fetchall() == [("r", 7)]
