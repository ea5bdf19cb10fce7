"""The GPUs of this node, counted by a process that ends right afterwards.

Where NVML cannot be asked torch counts by starting CUDA, and where CUDA was started no process can be forked that uses it: so
whoever forks ranks does not count.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec
import torch

from unskew.runtime.nvml import gpu_models


class NodeGpus(msgspec.Struct, frozen=True):
    """How many there are, and their models with their bytes of memory, () where these are not known."""

    count: int
    models: tuple[tuple[str, int], ...] = ()


def node_gpus() -> NodeGpus:
    """Of this node; may be called where only one thread is."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return NodeGpus(0)
    answer, write = os.pipe()
    if (pid := os.fork()) == 0:
        with suppress(BaseException):
            count = torch.cuda.device_count()
            os.write(write, msgspec.json.encode(NodeGpus(count, gpu_models(count))))
        os._exit(0)
    os.close(write)
    with os.fdopen(answer, "rb") as pipe:
        counted = pipe.read()
    os.waitpid(pid, 0)
    return msgspec.json.decode(counted, type=NodeGpus) if counted else NodeGpus(0)
