"""The notebook in docs/ runs from top to bottom over the recorded run, and its outputs are what its cells answer."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from typing import Any

import pytest
from support.paths import DOCS

NOTEBOOK = DOCS / "guide" / "unskew.ipynb"


@pytest.mark.limit(120)
def test_the_outputs_of_the_notebook_are_what_its_cells_answer() -> None:
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        assert answer("".join(cell["source"]), names) == shown(cell), cell["source"]
    assert sum(bool(cell["outputs"]) for cell in cells) == len(cells) - 1, "all but the last, which closes the log"
    assert names["slowdown"].filter(names["pl"].col("rank") == 3)["30"].item() > 1.3


def answer(source: str, names: dict[str, Any]) -> str:
    """What a notebook shows of a cell: what it prints, and its last expression."""
    *statements, last = ast.parse(source).body
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), NOTEBOOK.name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
        else:
            exec(compile(ast.Module([last], []), NOTEBOOK.name, "exec"), names)
    return printed.getvalue() + ("" if value is None else repr(value))


def shown(cell: dict[str, Any]) -> str:
    return "".join("".join(output["data"]["text/plain"] if "data" in output else output["text"]) for output in cell["outputs"])
