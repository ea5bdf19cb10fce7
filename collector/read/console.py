"""SQL for people: the views and nothing else. What they type cannot write, read other files, change settings or run for ever.

Three walls, because each alone was got over when tried: the query runs in a process of its own, which may write no file and is
killed by the kernel when its time is up (some functions never look at an interrupt); its DuckDB has no access to files and its
settings are locked (the type of a statement is no guard: `with x as (copy ...) select 1` counts as a SELECT); the data come in
as objects, so that no folder has to be allowed (an allowed folder can be overwritten).
"""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from unskew.collector.paths import Store

if TYPE_CHECKING:
    import duckdb
    import polars
    import pyarrow  # type: ignore[import-untyped]

    from unskew.collector.read.on_demand import ViewsOnDemand
    from unskew.collector.read.reader import ReaderSources

_MEMORY = "600 MB"
_LOCKS = (
    f"set memory_limit = '{_MEMORY}'",
    "set threads = 2",
    "set temp_directory = ''",
    "set python_enable_replacements = false",
    "set autoinstall_known_extensions = false",
    "set autoload_known_extensions = false",
    "set enable_external_access = false",
    "set lock_configuration = true",
)
_START_S = 30.0
"""Beyond the query's own time: for a process to start, to open the store on a busy machine, and to hand over the rows."""
_LIMITS = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: 8 * 1024**3}
"""Bytes: of a file that the child writes, of its core dump, of its address space."""
_DATA_BYTES = 800_000_000
"""What the child may take beside what it took to open the store: DuckDB does not count all that it takes as its memory."""
_ANSWER_BYTES = 250_000_000
"""Whoever asked holds the answer up to three times while it is read."""
_BATCH_ROWS = 100_000
_REFUSED = 3
_Taken = TypeVar("_Taken")
_STRANGE = re.compile(r"\b(INTERVAL|UNION|BIGNUM|BIT|GEOMETRY|UHUGEINT|TIME WITH TIME ZONE|TIMETZ|VARIANT)\b")


class ConsoleError(ValueError):
    """The query is wrong, forbidden or too long; one sentence."""


class _WithoutPandas(MetaPathFinder):
    """Keeps pandas out of the child: Arrow's data sets load it where it is installed, which is a third of a query's CPU."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(fullname)


class _Request(msgspec.Struct):
    root: str
    sql: str
    timeout_s: float
    row_limit: int | None


def query(store: Store, sql: str, timeout_s: float = 30.0, row_limit: int | None = 100_000) -> polars.DataFrame:
    """The rows that `sql` asks for, at most `row_limit` of them (None = all). Raises `ConsoleError`.

    A query that runs longer than `timeout_s` is stopped. Values of a type that Polars lacks (intervals, unions) come as text;
    a column whose name another has gets a number behind its own.
    """
    import polars  # noqa: PLC0415 - not needed in the child

    request = msgspec.json.encode(_Request(str(store.root), sql, timeout_s, row_limit))
    # -P: the caller's folder must not shadow what the child imports.
    command = [sys.executable, "-P", "-m", __spec__.name]
    try:
        child = subprocess.run(command, input=request, capture_output=True, timeout=timeout_s + _START_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConsoleError(f"the store could not be opened within {_START_S:g} s") from error
    if child.returncode == -signal.SIGALRM:
        raise ConsoleError(f"the query was stopped after {timeout_s:g} s: select fewer rows or give it more time")
    if child.returncode == _REFUSED:
        raise ConsoleError(child.stderr.decode())
    if child.returncode != 0:
        last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "it may have needed too much memory"
        raise ConsoleError(f"the query ended its process (exit {child.returncode}): {last}")
    return polars.read_ipc_stream(io.BytesIO(child.stdout))


def locked(root: str) -> ViewsOnDemand:
    """The views of the store at `root`, over a connection that can do nothing else."""
    import duckdb  # noqa: PLC0415

    from unskew.collector.read.reader import open_store  # noqa: PLC0415

    connection = duckdb.connect(":memory:")
    with open_store(root) as reader:
        sources = reader.sources()
    views = _views(connection, sources)
    for setting in _LOCKS:
        connection.execute(setting).fetchall()
    return views


def ask(
    views: ViewsOnDemand,
    sql: str,
    take: Callable[[pyarrow.RecordBatchReader], _Taken],
    row_limit: int | None = None,
) -> _Taken:
    """What `take` makes of the answer to one query over `locked` views; batch by batch. Raises `ConsoleError`."""
    import duckdb  # noqa: PLC0415

    with _console_errors():
        try:
            kinds = [statement.type for statement in views.connection.extract_statements(sql)]
        except ValueError:  # a kind that DuckDB's Python has no name for
            kinds = []
        if kinds not in ([duckdb.StatementType.SELECT], [duckdb.StatementType.EXPLAIN]):
            raise ConsoleError("the console answers one query: SELECT, DESCRIBE, SHOW, SUMMARIZE or EXPLAIN")
        answer = views.sql(_without_end(sql)).project("*")  # columns of one name get different ones
        if row_limit is not None:
            answer = answer.limit(row_limit)
        return take(_plain(answer).to_arrow_reader(_BATCH_ROWS))


@contextmanager
def _console_errors() -> Iterator[None]:
    """What DuckDB complains about becomes a `ConsoleError`."""
    import duckdb  # noqa: PLC0415

    from unskew.collector.files.damage import damage  # noqa: PLC0415

    try:
        yield
    except duckdb.PermissionException as error:
        raise ConsoleError(f"the console reads the store's views and nothing else: {_sentence(error)}") from error
    except duckdb.CatalogException as error:
        raise ConsoleError(_unknown(str(error)) or _sentence(error)) from error
    except (duckdb.Error, OSError) as error:  # through Arrow, DuckDB's complaints are of the second kind
        if "Out of Memory" in str(error):
            raise ConsoleError(f"the query needs more than {_MEMORY} of memory: select fewer rows or columns") from error
        raise ConsoleError(str(damage(error) or _sentence(error))) from error


def _answer(request: _Request) -> None:
    """In the child: the rows as an Arrow stream on stdout."""
    views = locked(request.root)
    _bound_memory()
    signal.setitimer(signal.ITIMER_REAL, request.timeout_s)  # the kernel ends the process
    ask(views, request.sql, _send, request.row_limit)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _send(rows: pyarrow.RecordBatchReader) -> None:
    import pyarrow as pa  # noqa: PLC0415

    sent = 0
    with pa.ipc.new_stream(sys.stdout.buffer, rows.schema) as writer:
        for batch in rows:
            sent += batch.nbytes
            if sent > _ANSWER_BYTES:
                raise ConsoleError(f"the answer is larger than {_ANSWER_BYTES // 10**6} MB: select fewer rows or columns")
            writer.write_batch(batch)


def _bound_memory() -> None:
    taken_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = taken_pages * resource.getpagesize() + _DATA_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _views(connection: duckdb.DuckDBPyConnection, sources: ReaderSources) -> ViewsOnDemand:
    """The views over objects: Arrow data sets, which need no folder to be allowed, out of the way in a schema of their own."""
    import pyarrow.dataset  # type: ignore[import-untyped]  # noqa: PLC0415

    from unskew.collector.read.on_demand import ViewsOnDemand  # noqa: PLC0415
    from unskew.collector.read.outcomes import SET_HELD  # noqa: PLC0415

    def register(name: str, files: list[str], schema: pyarrow.Schema | None = None) -> str:
        connection.register(name, pyarrow.dataset.dataset(files, schema=schema))
        return f"select * from {name}"

    connection.execute(SET_HELD, [sources.held]).fetchall()
    connection.register("stored_open", sources.hot)
    parts = {"rest": ["select * from stored_open"], "log": []}
    for name, files, part in (("stored_unprojected", sources.unprojected, "rest"), ("stored_sealed", sources.sealed, "log")):
        if files:
            parts[part].append(register(name, files, sources.hot.schema))
    rest = " union all by name ".join(parts["rest"])
    connection.execute(f"create view log as {' union all by name '.join((rest, *parts['log']))}").fetchall()
    published = {name: register(f"stored_{name}", files) for name, files in sources.published.items()}
    return ViewsOnDemand(connection, published, f"({rest})")


def _unknown(message: str) -> str | None:
    """What to say about a view or function that does not exist; None for other messages."""
    import difflib  # noqa: PLC0415

    from unskew.collector.read.views import VIEWS  # noqa: PLC0415

    named = re.search(r"Table with name (\S+) does not exist", message)
    if named is None:
        return None
    near = difflib.get_close_matches(named[1], VIEWS, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(VIEWS))}"
    return f"there is no view {named[1]}: {hint}"


def _without_end(sql: str) -> str:
    """The one query in `sql`, without the semicolons and comments behind it: DuckDB puts it into another."""
    import duckdb  # noqa: PLC0415

    text = sql.encode()
    for at, kind in reversed(duckdb.tokenize(sql)):
        if kind != duckdb.token_type.comment and text[at : at + 1] != b";":
            break
        text = text[:at]
    return text.decode()


def _plain(answer: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """The same rows with text in the columns whose type Polars cannot take: it would end the process."""
    strange = [name for name, kind in zip(answer.columns, answer.types, strict=True) if _STRANGE.search(str(kind))]
    if not strange:
        return answer
    names = [(name, '"' + name.replace('"', '""') + '"') for name in answer.columns]
    return answer.project(", ".join(f"{quoted}::varchar as {quoted}" if name in strange else quoted for name, quoted in names))


def _sentence(error: Exception) -> str:
    """DuckDB's message in one line, without the quoted query."""
    return " ".join(str(error).partition("\n\nLINE")[0].split())


def main() -> None:
    """The child: a request on stdin, Arrow on stdout, or one sentence on stderr."""
    import duckdb  # noqa: PLC0415

    from unskew.collector.files.damage import damage  # noqa: PLC0415

    sys.meta_path.insert(0, _WithoutPandas())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for who asked, and that one ends this process
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    for limit, value in _LIMITS.items():
        resource.setrlimit(limit, (value, value))
    try:
        _answer(request)
    except (ValueError, OSError, duckdb.Error, MemoryError) as error:  # Arrow's errors are of the first two kinds
        sys.stderr.write(str(damage(error) or _sentence(error)))
        _end(_REFUSED)
    _end(0)


def _end(status: int) -> NoReturn:
    """Without the interpreter's farewell: nothing of this process is needed any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
