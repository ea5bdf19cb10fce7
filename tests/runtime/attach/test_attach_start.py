"""What attaching costs a process before its loop begins: next to nothing that is imported, no look for garbage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_attaching_imports_msgspec_only() -> None:
    code = (
        "import sys, unskew.runtime.attach.session, unskew.runtime.attach.start;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    ).stdout.split()
    assert not {"torch", "numpy", "polars", "duckdb", "pyarrow", "typer", "rich"} & set(modules)
    assert "msgspec" in modules


def test_attaching_looks_for_no_garbage_and_leaves_collecting_on(tmp_path: Path) -> None:
    """Among all that torch holds a look takes twice as long as attaching does, and it would be due just now."""
    code = (
        "import gc, torch, unskew; gc.set_threshold(20, 1, 1); seen = [];"
        "gc.callbacks.append(lambda phase, of: seen.append(phase));"
        f"unskew.attach({str(tmp_path)!r}); gc.callbacks.pop(0); print(gc.isenabled(), len(seen))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    collects, looks = done.stdout.split()
    assert collects == "True"
    assert int(looks) < 100, "700 and more, if collecting goes on"
