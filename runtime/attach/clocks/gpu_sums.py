"""Collectives of GPUs that the caller's own stream waits for: NCCL gives nothing back that could be waited for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

_Function = Callable[..., Any]
SUMS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "all_gather_single",
    "_allgather_base", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "alltoall", "alltoall_base", "gather",
    "scatter", "barrier",
)  # fmt: skip
"""What a process group is asked for, by the names of torch 2.11 and of 2.13."""


def wrap_sums(waiting: Callable[[_Function], _Function]) -> None:
    """All that is not asked for asynchronously is a wait, as `waiting` makes of it one."""
    for name in (name for name in SUMS if hasattr(dist.ProcessGroup, name)):
        original = getattr(dist.ProcessGroup, name)
        setattr(dist.ProcessGroup, name, wraps(original)(_wrapped(original, waiting(original))))


def _wrapped(original: _Function, measured: _Function) -> _Function:
    def collective(*arguments: Any, **named: Any) -> Any:
        options = named.get("opts", arguments[-1])
        return (original if getattr(options, "asyncOp", True) else measured)(*arguments, **named)

    return collective
