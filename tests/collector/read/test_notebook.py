"""The notebook in docs/ runs from top to bottom over a store, and shows what it says it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import dashboard_runs as runs
from support.paths import DOCS

from unskew.collector.paths import Store

NOTEBOOK = DOCS / "guide" / "unskew.ipynb"


@pytest.mark.limit(120)
def test_the_notebook_runs_over_a_store_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSKEW_STORE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    runs.after_death(Store(tmp_path)).close()
    names: dict[str, Any] = {}
    notebook = json.loads(NOTEBOOK.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "committed without outputs"
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name} {cell['id']}", "exec"), names)
    assert names["run"] == "death"
    assert names["slowdown"].filter(names["pl"].col("rank") == 3)["30"].item() > 1.3
    assert names["per_rank"].columns == ["rank", "kind", "n", "median_ms"]
    assert names["iterations"].height > 50
