"""Whether there is a GPU, and how time on it is kept short: what breaks or hangs on it costs itself alone."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

_Found = TypeVar("_Found")


def no_gpu() -> str:
    """Why nothing can be measured here, in a sentence; "" where there is a GPU."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return "not measured: this torch is built without CUDA"
    return "" if torch.cuda.is_available() else "not measured: there is no GPU at hand"


def gpu_name() -> str:
    """The model of the first GPU."""
    name: str = torch.cuda.get_device_name(0)
    return name


def apart(work: Callable[[], _Found], limit_s: float) -> _Found:
    """What `work` gives in a process of its own, for after an error of CUDA a process can do no more on the GPU. Raises
    `RuntimeError` with what broke there, `TimeoutError` after so long."""
    with tempfile.TemporaryDirectory(prefix="unskew-gpu-") as folder:
        answer = Path(folder) / "answer"
        command = [sys.executable, "-P", "-m", "unskew.benchmarks.gpu.at_hand", str(answer)]
        try:
            ended = subprocess.run(command, input=pickle.dumps(work), timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done within {limit_s:g} s") from None
        if not answer.exists():
            raise RuntimeError(f"its process ended with code {ended.returncode}")
        found, broke = pickle.loads(answer.read_bytes())
    if broke:
        raise RuntimeError(broke)
    result: _Found = found
    return result


def _answer(path: Path) -> None:
    """What the process of `apart` does: the work comes on stdin."""
    try:
        found = pickle.load(sys.stdin.buffer)(), ""
    except Exception as error:
        traceback.print_exc()
        found = None, f"{type(error).__name__}: {error}"
    path.with_suffix(".new").write_bytes(pickle.dumps(found))
    path.with_suffix(".new").rename(path)


@contextmanager
def within(limit_s: int) -> Iterator[None]:
    """Break off a run that takes longer, as Ctrl-C would. Raises `TimeoutError`."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {limit_s} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
