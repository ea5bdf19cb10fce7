"""How a process comes to be measured: by `unskew.attach()`, or without a line of its own (boot/sitecustomize.py).

`UNSKEW=0` switches all of it off; `UNSKEW_STORE` names the store, `UNSKEW_RUN` the run, which ranks have in common.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unskew.runtime.attach.session import LoopSession

_session: LoopSession | None = None


def attach(store: str | os.PathLike[str] | None = None, *, run: str | None = None) -> LoopSession:
    """Measure the training loop of this process from its first `backward()` on; a second call returns the same session.

    Raises `StoreError` for a store that cannot be one. Imports torch.
    """
    global _session  # noqa: PLW0603 - torch is one to a process, and so is what measures it
    if _session is None:
        with _without_collections():
            from unskew.collector.paths import Store  # noqa: PLC0415 - what is imported here is to be collected nowhere
            from unskew.runtime.attach import seams  # noqa: PLC0415 - it imports torch
            from unskew.runtime.attach.session import LoopSession  # noqa: PLC0415

            session = LoopSession(Store.locate(store), run or run_name(os.environ), lambda: seams.facts(session))
            _session = session
            if os.environ.get("UNSKEW") == "0":
                _session.close()
            else:
                _session.off = seams.install(_session)
    return _session


@contextmanager
def _without_collections() -> Iterator[None]:
    """What is imported stays: looking for garbage in it, and in all of torch, may take twice as long as attaching itself."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def run_name(environment: Any) -> str:
    """The run's name: given, else by what all ranks of one start have in common."""
    if given := environment.get("UNSKEW_RUN"):
        return str(given)
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        if (found := environment.get(variable)) and found != "none":
            return f"job-{found}"
    started = environment.get("MASTER_PORT")
    return f"{time.strftime('%Y%m%d')}-job-{started}" if started else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
