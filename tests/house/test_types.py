"""Types are checked beside other tests: by itself mypy leaves a core idle for half a minute."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.paths import ROOT


@pytest.mark.slow
@pytest.mark.limit(300)
def test_types_are_those_that_are_stated() -> None:
    checked = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
