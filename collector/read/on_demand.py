"""The views of one connection, each defined when a query first names it: to define them all takes half a second of a core.

A query needs what its words name, in its text or in that of a view it needs; a word that only looks like a view costs a
definition and nothing else. What a query names in some other way (escapes, a name put together) DuckDB does not find: then,
and where the catalog itself is asked, every view is defined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import duckdb

from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.read.views import EXECUTED, VIEWS, projection_view, view

_PROJECTED = "projected."
_TEXTS = {
    **{f"{_PROJECTED}{name}": "" for name in PROJECTIONS},
    **{name: query.lower() for name, query in VIEWS.items()},
    "executed": EXECUTED.lower(),
}
"""What is defined -> the text that may name others, in an order in which each builds only on earlier ones."""
_WORD = re.compile(rf"(?:{re.escape(_PROJECTED)})?\w+")
_OF_CATALOG = re.compile(r"\b(show|describe|information_schema|(duckdb|pragma|pg|sqlite)_\w+)\b|^\s*desc\b")


class ViewsOnDemand:
    """Over the relation `log` of a connection; `published` and `rest` as in `views.project`."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, published: Mapping[str, str] | None = None, rest: str = "log"
    ) -> None:
        self.connection = connection
        self._published, self._rest = published or {}, rest
        self._defined: set[str] = set()
        connection.execute("create schema if not exists projected").fetchall()

    def project(self, published: Mapping[str, str], rest: str) -> None:
        """The projections are of other rows from now on."""
        self._published, self._rest = published, rest
        self._defined -= {f"{_PROJECTED}{name}" for name in PROJECTIONS}

    def sql(self, query: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> duckdb.DuckDBPyRelation:
        """The answer to a query over the views. Raises `duckdb.Error` for a wrong one."""
        self._define(needed(query))
        try:
            return self.connection.sql(query, params=params)
        except duckdb.CatalogException:
            if self._defined.issuperset(_TEXTS):
                raise
        self.define_all()
        return self.connection.sql(query, params=params)

    def define_all(self) -> None:
        """For queries that do not come by way of `sql`."""
        self._define(_TEXTS)

    def _define(self, wanted: Sequence[str] | Mapping[str, str]) -> None:
        for name in wanted:
            if name not in self._defined:
                self.connection.execute(self._statement(name)).fetchall()
                self._defined.add(name)

    def _statement(self, name: str) -> str:
        if name.startswith(_PROJECTED):
            return projection_view(name.removeprefix(_PROJECTED), self._published, self._rest)
        return EXECUTED if name == "executed" else view(name)


def needed(query: str) -> Sequence[str]:
    """What has to be defined for `query`, in order."""
    query = query.lower()
    if _OF_CATALOG.search(query):
        return tuple(_TEXTS)
    wanted = {one for name in _named_in(query) for one in _closure(name)}
    return [name for name in _TEXTS if name in wanted]


def _named_in(text: str) -> Iterator[str]:
    return (name for name in dict.fromkeys(_WORD.findall(text)) if name in _TEXTS)


@cache
def _closure(name: str) -> frozenset[str]:
    """`name` and all that it builds on: names in its text that come before it."""
    order = list(_TEXTS)
    earlier = set(order[: order.index(name)])
    return frozenset({name}).union(*(_closure(one) for one in _named_in(_TEXTS[name]) if one in earlier))
