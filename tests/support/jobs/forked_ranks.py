"""The ranks of a training, forked from a process that has imported what they need: their imports take longest."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable


def forked_ranks(ranks: int, train: Callable[[int], object]) -> bool:
    """Train with so many ranks, each in a process of its own; whether all of them ended well.

    What `train` returns is kept until the process ends: who lets go of a process group, as `destroy_process_group` does, holds
    Python while Gloo's thread ends, which may be waiting for Python for ever (torch 2.13).
    """
    importlib.import_module("torch._dynamo")  # what DDP and the first step of an optimizer import: seconds, once for all ranks
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            try:
                _kept = train(rank)
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                os._exit(1)
        pids.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    return not any(ended)
