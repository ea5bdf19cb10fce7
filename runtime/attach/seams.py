"""Everything of torch that the measuring takes hold of, its private names among them.

No module of the user's is touched: four seams of torch itself are wrapped, once per process. Each is looked at first; one that
is not there in this version of torch is left alone, and a sentence says what is not measured then. While a function is being
compiled nothing of ours runs in it.

1. `torch.autograd.backward`, with a callback of the engine that runs when the rank's own gradients are there: the first one
   queued, so before DDP waits for the others;
2. waits: `Work.wait`, the functional collectives' `wait_tensor`, DDP's copying of buffers;
3. the data loader's iterator, and the call of a DDP or FSDP2 model, whose arguments show the lengths;
4. the optimizers' hooks, and `GradScaler.step`, which skips the optimizer after an overflow: a step it is nevertheless.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils.data import dataloader

from unskew.runtime.attach.session import JobFacts, LoopSession

_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_Seam = tuple[str, str, Callable[[], object]]
"""Its name, what is measured by it, and what wraps it."""
PIPELINE = "who is slow: ranks may be stages of a pipeline (torch.distributed.pipelining is loaded), which do different work"
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"
_wrapped: set[str] = set()


def install(session: Callable[[], LoopSession | None]) -> tuple[str, ...]:
    """Wrap the seams. What cannot be measured, a sentence each."""
    now = _unless_compiling(session)
    seams: tuple[_Seam, ...] = (
        ("torch.autograd.backward", "forward and backward passes", lambda: _backward(now)),
        ("torch._C._distributed_c10d.Work.wait", "waits for other ranks", lambda: _waits(now)),
        ("DistributedDataParallel._sync_buffers", "waits for other ranks' buffers", lambda: _buffers(now)),
        ("distributed_c10d._world.pg_group_ranks", "which ranks form groups", lambda: _world().pg_group_ranks),
        ("torch.nn.parallel.DistributedDataParallel", "the lengths of what a DDP model is given", lambda: _ddp(now)),
        ("torch.utils.data.dataloader._BaseDataLoaderIter", "waiting for data", lambda: _loader(now)),
        ("torch.optim.optimizer hooks", "the optimizer's step, and with it whole steps", lambda: _optimizers(now)),
        ("torch.amp.GradScaler.step", "steps that an overflow skips", lambda: _scaler(now)),
    )
    return _hold(seams)


def _unless_compiling(session: Callable[[], LoopSession | None]) -> Callable[[], LoopSession | None]:
    return lambda: None if torch.compiler.is_compiling() else session()


def _hold(seams: tuple[_Seam, ...]) -> tuple[str, ...]:
    """Wrap those that are not yet; a sentence for each that is not there."""
    missing = []
    for name, what, wrap in seams:
        if name in _wrapped:
            continue
        try:
            wrap()
            _wrapped.add(name)
        except (AttributeError, ImportError, TypeError) as error:
            missing.append(f"{what}: torch {torch.__version__} has no {name} as it is known here ({error})")
    return tuple(missing)


def facts(session: Callable[[], LoopSession | None]) -> JobFacts:
    """The process's place in its job, as torch.distributed has it, else as its launcher says; asked when the loop has begun, so
    what it uses is imported and can be wrapped."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    unknown: tuple[str, ...] = (PIPELINE,) if "torch.distributed.pipelining.stage" in sys.modules else ()
    if FSDP2 in sys.modules:  # importing it takes a second
        wrap = partial(_fsdp2, _unless_compiling(session))
        unknown += _hold(((f"{FSDP2}.FSDPState._root_pre_forward", "the lengths of what an FSDP2 model is given", wrap),))
    if not (dist.is_available() and dist.is_initialized()):
        return JobFacts(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), (), on_gpu, unknown)
    ranks = dist.get_world_size()
    members = {tuple(sorted(of)) for of in getattr(_world(), "pg_group_ranks", {}).values()}
    groups = sorted(of for of in members if 1 < len(of) < ranks)
    return JobFacts(dist.get_rank(), ranks, tuple(groups), on_gpu, unknown)


def _replace(owner: Any, name: str, wrap: _Wrap) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(wrap(original)))


def _backward(now: Callable[[], LoopSession | None]) -> None:
    engine: Any = Variable._execution_engine
    engine.queue_callback  # noqa: B018 - raises where it is not there
    nested = 0

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal nested
            session = now()
            if session is None or nested or not session.active:
                return original(tensors, *arguments, **named)
            root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            session.backward(_loss(root))
            queued = False

            def reached(*_: Any) -> None:
                nonlocal queued
                if not queued:
                    queued = True
                    engine.queue_callback(session.computed)

            node = getattr(root, "grad_fn", None)
            hook = node.register_prehook(reached) if node is not None else None
            nested += 1
            try:
                return original(tensors, *arguments, **named)
            finally:
                nested -= 1
                if hook is not None:
                    hook.remove()
                session.returned()

        return backward

    _replace(torch.autograd, "backward", wrap)


def _loss(root: Any) -> float | None:
    """The value that `backward()` begins at, where it is at hand: a device's would be waited for."""
    if root is None or root.device.type != "cpu" or root.numel() != 1:
        return None
    return float(root.detach())


def _waits(now: Callable[[], LoopSession | None]) -> None:
    if not dist.is_available():
        return
    import torch.distributed._functional_collectives as functional  # noqa: PLC0415 - not where torch has no distributed part

    wrap = _waiting(now)
    _replace(torch._C._distributed_c10d.Work, "wait", wrap)
    _replace(functional, "wait_tensor", wrap)


def _buffers(now: Callable[[], LoopSession | None]) -> None:
    _replace(DistributedDataParallel, "_sync_buffers", _waiting(now))


def _world() -> Any:
    return dist.distributed_c10d._world


def _waiting(now: Callable[[], LoopSession | None]) -> _Wrap:
    nested = 0

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **named: Any) -> Any:
            nonlocal nested
            session = now()
            if session is None or nested or not session.active:
                return original(*arguments, **named)
            nested += 1
            try:
                with session.waiting():
                    return original(*arguments, **named)
            finally:
                nested -= 1

        return wait

    return wrap


def _ddp(now: Callable[[], LoopSession | None]) -> None:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            session = now()
            if session is not None and session.active:
                session.called({**named, "": arguments[1:]})
            return original(*arguments, **named)

        return forward

    _replace(DistributedDataParallel, "forward", wrap)


def _fsdp2(now: Callable[[], LoopSession | None]) -> None:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def root_pre_forward(state: Any, module: Any, arguments: Any, named: Any) -> Any:
            answer = original(state, module, arguments, named)
            session = now()
            if session is not None and session.active and getattr(state, "_is_root", False):
                session.called({**named, "": arguments})
            return answer

        return root_pre_forward

    _replace(sys.modules[FSDP2].FSDPState, "_root_pre_forward", wrap)


def _loader(now: Callable[[], LoopSession | None]) -> None:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def following(iterator: Any) -> Any:
            session = now()
            if session is None or not session.active:
                return original(iterator)
            since = session.loading()
            batch = original(iterator)
            session.loaded(since, batch)
            return batch

        return following

    _replace(dataloader._BaseDataLoaderIter, "__next__", wrap)


def _optimizers(now: Callable[[], LoopSession | None]) -> None:
    def before(*_: Any) -> None:
        if (session := now()) is not None:
            session.stepping()

    def after(*_: Any) -> None:
        if (session := now()) is not None:
            session.stepped()

    optimizer.register_optimizer_step_pre_hook(before)
    optimizer.register_optimizer_step_post_hook(after)


def _scaler(now: Callable[[], LoopSession | None]) -> None:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            if (session := now()) is None:
                return original(*arguments, **named)
            session.stepping()
            answer = original(*arguments, **named)
            session.stepped()
            return answer

        return step

    _replace(torch.amp.GradScaler, "step", wrap)
