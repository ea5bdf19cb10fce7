"""Ctrl-C at any moment: no traceback, and none that is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

LOADED = """
import sys
before = set(sys.modules)
{}
print(*set(sys.modules) - before)
"""
SCRIPT = Path(__file__).parents[2] / "bin" / "unskew"
LOST = """
import signal
from unskew.commands.common import ctrl_c
signal.signal(signal.SIGINT, ctrl_c)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    import loads
"""
LOADS = """
import gc, signal
class Lost:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
Lost()
"""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("begins", ["import unskew.__main__", f"exec(open({str(SCRIPT)!r}).read(), {{'__name__': 'script'}})"])
def test_nothing_is_loaded_before_ctrl_c_ends_it_without_a_word(begins: str, tmp_path: Path) -> None:
    ended = python(LOADED.format(begins), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.split()) <= {"unskew", "unskew.__main__", "__future__"}


@pytest.mark.slow
def test_while_something_is_loaded_no_interrupt_is_lost(tmp_path: Path) -> None:
    """Python drops an exception out of a finaliser, and prints that it did."""
    (tmp_path / "loads.py").write_text(LOADS)
    ended = python(LOST, tmp_path)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
