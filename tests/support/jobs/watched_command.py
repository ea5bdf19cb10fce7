"""`unskew watch -- CMD` as a process of its own, and what the ranks of its command wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store

ONE_STEP = "import torch; model = torch.nn.Linear(2, 2); model(torch.ones(1, 2)).sum().backward()"


def watched(tmp_path: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    unskew = [sys.executable, "-m", "unskew", "watch", "--store", str(tmp_path / "store"), "--json", str(tmp_path / "w.json")]
    environment = {**os.environ, **more}
    return subprocess.run([*unskew, "--", *command], capture_output=True, text=True, check=False, timeout=100, env=environment)


def runs_that_ranks_wrote(tmp_path: Path) -> list[str]:
    with open_store(Store(tmp_path / "store")) as reader:
        return [run for (run,) in reader.sql("select run from events where type like 'rank_attached%' order by run").rows()]
