"""Everything of torch that the measuring takes hold of, its private names among them.

No module of the user's is touched: seams of torch itself are wrapped, once per process. Each is looked at first; one that
is not there in this version of torch is left alone, and a sentence says what is not measured then. While a function is being
compiled nothing of ours runs in it.

1. `torch.autograd.backward`, with a callback of the engine that runs when the rank's own gradients are there: the first one
   queued, so before DDP waits for the others;
2. waits: `Work.wait`, the functional collectives' `wait_tensor`, DDP's copying of buffers;
3. the data loader's iterator, and the call of a DDP or FSDP2 model, whose arguments show the lengths;
4. the optimizers' hooks, and `GradScaler.step`, which skips the optimizer after an overflow: a step it is nevertheless;
5. what interrupts it, and torchtitan's own log (pauses.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from threading import get_ident
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils.data import dataloader

from unskew.collector.events import ChunkKind, PipelinePlace
from unskew.runtime.attach import pauses
from unskew.runtime.attach.after_import import after_import
from unskew.runtime.attach.clocks.gpu import StreamClock, gpu_name
from unskew.runtime.attach.clocks.gpu_sums import wrap_sums
from unskew.runtime.attach.session import JobFacts, LoopSession
from unskew.runtime.attach.timeline import LoopTimeline

_Function = Callable[..., Any]
_Wrap = Callable[[_Function], _Function]
_Seam = tuple[str, str, Callable[[], object]]
"""Its name, what is measured by it, and what wraps it."""
STAGE = "torch.distributed.pipelining.stage"
FUNCTIONAL = "torch.distributed._functional_collectives"
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"
MESH = "mesh_"
"""How a `DeviceMesh` describes the groups of its dimensions."""
PRODUCT = 256
"""Rows of the matrix that a probe multiplies."""
_wrapped: set[str] = set()


def flight_recorder() -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """The dump of this process as JSON, empty where torch has none, and the members of its groups, which Gloo's leaves out.
    Some 20 us an entry, with the interpreter's lock held. NCCL keeps one of its own."""
    if not dist.is_available():
        return b"", {}
    by_nccl = dist.is_initialized() and "nccl" in str(dist.get_backend())
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if by_nccl else "_dump_fr_trace_json", None)
    if dump is None:
        return b"", {}
    names, members = _world().pg_names, _world().pg_group_ranks
    known = {str(names[group]): tuple(sorted(of)) for group, of in members.items() if group in names}
    return bytes(dump(includeCollectives=True, onlyActive=False)), known


def install(session: LoopSession) -> tuple[str, ...]:
    """Wrap the seams. What cannot be measured, a sentence each."""
    session.flights, session.product = flight_recorder, _product
    waiting, titan = _waiting(session), pauses.TORCHTITAN
    later: tuple[tuple[str, str, str, Callable[[ModuleType], object]], ...] = (  # importing them takes long
        (STAGE, STAGE, "stages of a pipeline", lambda stage: _pipeline(session, stage)),
        (FUNCTIONAL, f"{FUNCTIONAL}.wait_tensor", "waits for others", lambda of: _replace(of, "wait_tensor", waiting)),
        (titan, f"{titan}._structured_logger", "waiting for data", lambda log: pauses.listen_to_torchtitan(session, log)),
    )
    for module, name, what, wrap in later:
        after_import(module, partial(_hold_later, session, name, what, wrap))
    seams: tuple[_Seam, ...] = (
        ("torch.autograd.backward", "forward and backward passes", lambda: _backward(session)),
        ("torch._C._distributed_c10d.Work.wait", "waits for other ranks", lambda: _waits(waiting)),
        ("DistributedDataParallel._sync_buffers", "waits for other ranks' buffers", lambda: _buffers(session)),
        ("distributed_c10d._world.pg_group_ranks", "which ranks form groups", lambda: _world().pg_group_ranks),
        ("torch.nn.parallel.DistributedDataParallel", "the lengths of what a DDP model is given", lambda: _ddp(session)),
        ("torch.utils.data.dataloader._BaseDataLoaderIter", "waiting for data", lambda: _loader(session)),
        ("torch.optim.optimizer hooks", "the optimizer's step, and with it whole steps", lambda: _optimizers(session)),
        ("torch.amp.GradScaler.step", "steps that an overflow skips", lambda: _scaler(session)),
        ("gc.callbacks", "garbage collections", lambda: pauses.collections(session)),
        ("torch.save", "checkpoints", lambda: _replace(torch, "save", pauses.saving(session))),
        ("torch.nn.Module.train", "evaluations", lambda: _replace(torch.nn.Module, "train", pauses.evaluating(session))),
    )
    return _hold(seams)


def _product() -> None:
    """A matrix product on the rank's core, whatever the loop has set."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        matrix = torch.full((PRODUCT, PRODUCT), 0.5, device="cpu", dtype=torch.float32)
        _ = matrix @ matrix


def _hold_later(session: LoopSession, name: str, what: str, wrap: Callable[[ModuleType], object], module: ModuleType) -> None:
    session.lacks(_hold(((name, what, lambda: wrap(module)),)))


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
            missing.append(f"{what}: {name} is not there as it is known here (torch {torch.__version__}: {error})")
    return tuple(missing)


def facts(session: LoopSession) -> JobFacts:
    """The process's place in its job, as torch.distributed has it, else as its launcher says; asked when the loop has begun, so
    what it uses is imported and can be wrapped."""
    place = session.device
    on_gpu = torch.cuda.is_initialized() if place is None else place.type == "cuda"  # type: ignore[no-untyped-call]
    unknown: tuple[str, ...] = ()
    if on_gpu and place is not None:
        session.peak, session.gpu = partial(torch.cuda.max_memory_allocated, place), gpu_name(place.index)
        session.gpu_clock = partial(StreamClock, place.index)
        unknown += _hold((("torch.distributed.ProcessGroup", "waits for others", lambda: wrap_sums(_waiting(session))),))
    if on_gpu and FSDP2 in sys.modules:
        unknown += ("waits of FSDP2: on a GPU its stream waits in the midst of its passes, which is not measured apart",)
    if FSDP2 in sys.modules:  # importing it takes a second
        wrap = partial(_fsdp2, session)
        unknown += _hold(((f"{FSDP2}.FSDPState._root_pre_forward", "the lengths of what an FSDP2 model is given", wrap),))
    if not (dist.is_available() and dist.is_initialized()):
        return JobFacts(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), (), on_gpu, unknown)
    ranks = dist.get_world_size()
    of_group = getattr(_world(), "pg_group_ranks", {}).items()  # torch stands a number for the groups that are others'
    members = {tuple(sorted(of)): str(group.group_desc) for group, of in of_group if isinstance(group, dist.ProcessGroup)}
    groups = sorted(of for of in members if 1 < len(of) < ranks)
    dimensions = tuple(members[of].removeprefix(MESH) if members[of].startswith(MESH) else "" for of in groups)
    return JobFacts(dist.get_rank(), ranks, tuple(groups), on_gpu, unknown, dimensions)


def _replace(owner: Any, name: str, wrap: _Wrap) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(wrap(original)))


def _backward(session: LoopSession) -> None:
    engine: Any = Variable._execution_engine
    queue: Callable[[Callable[[], None]], None] = engine.queue_callback
    nested, awaited = False, _nothing

    def reached(_: object) -> None:
        """The engine begins with the root; once a call, also where a graph that is kept is gone through again."""
        nonlocal awaited
        if awaited is not _nothing:
            computed, awaited = awaited, _nothing
            if (loop := session.timeline) is not None:
                loop.engine = get_ident()
            queue(computed)

    carrier = torch.empty(0, device="cpu")
    carrier._backward_hooks = {0: reached}  # a node takes hooks from any tensor's dictionary

    def wrap(original: _Function) -> _Function:
        def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal nested, awaited
            if (
                is_compiling()
                or nested
                or (loop := session.timeline or _begun(session, tensors)) is None
                or loop.thread != get_ident()
            ):
                return original(tensors, *arguments, **named)
            try:
                if session.clock is not None:
                    session.clock.adopt()
                root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
                # By register_prehook(), which makes a dictionary and a handle each time, it costs the loop twice as much.
                if loop.backward(_loss(root) if loop.asks else None) and (node := getattr(root, "grad_fn", None)) is not None:
                    awaited = loop.computed
                    node._register_hook_dict(carrier)
            except Exception as error:
                session.failed(error)
            nested = True
            try:
                return original(tensors, *arguments, **named)
            finally:
                nested, awaited, loop.engine = False, _nothing, loop.thread
                try:
                    loop.returned()
                except Exception as error:
                    session.failed(error)

        return backward

    _replace(torch.autograd, "backward", wrap)


def _begun(session: LoopSession, tensors: Any) -> LoopTimeline | None:
    """With the first `backward()`, which shows where the loop computes; what is no tensor is torch's to refuse."""
    if isinstance(tensors, Sequence):
        tensors = next(iter(tensors), None)
    session.device = getattr(tensors, "device", None)
    return session.loop_or_begin()


def _nothing() -> None:
    """What no callback is."""


def _loss(root: Any) -> float | None:
    """The value that `backward()` begins at, where it is at hand: a device's would be waited for."""
    return float(root.item()) if isinstance(root, torch.Tensor) and root.is_cpu and root.numel() == 1 else None


def _waits(waiting: _Wrap) -> None:
    if dist.is_available():
        _replace(torch._C._distributed_c10d.Work, "wait", waiting)


def _buffers(session: LoopSession) -> None:
    _replace(DistributedDataParallel, "_sync_buffers", _waiting(session))


def _world() -> Any:
    return dist.distributed_c10d._world


def _waiting(session: LoopSession) -> _Wrap:
    nested = False

    def wrap(original: _Function) -> _Function:
        def wait(*arguments: Any, **named: Any) -> Any:
            nonlocal nested
            if is_compiling() or nested or (loop := session.loop()) is None:
                return original(*arguments, **named)
            try:
                before = loop.wait()
            except Exception as error:
                session.failed(error)
                return original(*arguments, **named)
            nested = True
            try:
                return original(*arguments, **named)
            finally:
                nested = False
                try:
                    loop.waited(*before)
                except Exception as error:
                    session.failed(error)

        return wait

    return wrap


def _ddp(session: LoopSession) -> None:
    def wrap(original: _Function) -> _Function:
        def forward(model: Any, *arguments: Any, **named: Any) -> Any:
            if not is_compiling() and (loop := session.timeline) is not None and loop.thread == get_ident():
                try:
                    loop.called(_given(arguments, named), gathers=getattr(model, "require_backward_grad_sync", True))
                except Exception as error:
                    session.failed(error)
            return original(model, *arguments, **named)

        return forward

    _replace(DistributedDataParallel, "forward", wrap)


def _given(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """To a model."""
    return {**named, "": arguments} if named else arguments[0] if len(arguments) == 1 else arguments


def _fsdp2(session: LoopSession) -> None:
    def wrap(original: _Function) -> _Function:
        def root_pre_forward(state: Any, module: Any, arguments: Any, named: Any) -> Any:
            answer = original(state, module, arguments, named)
            if getattr(state, "_is_root", False) and not is_compiling() and (loop := session.loop()) is not None:
                try:
                    loop.called(_given(arguments, named), gathers=True)
                except Exception as error:
                    session.failed(error)
            return answer

        return root_pre_forward

    _replace(sys.modules[FSDP2].FSDPState, "_root_pre_forward", wrap)


def _pipeline(session: LoopSession, stage: ModuleType) -> None:
    """Each chunk of a stage, apart from what comes before it: the waits for its neighbours."""
    chunks: tuple[tuple[str, ChunkKind], ...] = (
        ("forward_one_chunk", "F"), ("backward_one_chunk", "B"), ("backward_weight_one_chunk", "W")
    )  # fmt: skip
    for name, kind in chunks:
        _replace(stage._PipelineStageBase, name, _chunk(session, kind))


def _chunk(session: LoopSession, kind: ChunkKind) -> _Wrap:
    places: dict[int, PipelinePlace] = {}

    def begins(stage: Any) -> None:
        if (place := places.get(stage.stage_index)) is None:
            members = tuple(sorted(dist.get_process_group_ranks(stage.group)))
            place = places[stage.stage_index] = PipelinePlace(stage.stage_index, stage.num_stages, members)
            session.pipeline, session.device = session.pipeline or place, stage.device
        if (loop := session.loop_or_begin()) is not None:
            loop.chunk_begins(place)

    def wrap(original: _Function) -> _Function:
        def chunk(stage: Any, number: int, *arguments: Any, **named: Any) -> Any:
            if is_compiling():
                return original(stage, number, *arguments, **named)
            try:
                begins(stage)
            except Exception as error:
                session.failed(error)
            answer = original(stage, number, *arguments, **named)
            try:
                if (loop := session.loop()) is not None:
                    loop.chunk_ends(kind, number, arguments[0] if arguments and kind == "F" and stage.is_first else None)
            except Exception as error:
                session.failed(error)
            return answer

        return chunk

    return wrap


def _loader(session: LoopSession) -> None:
    def wrap(original: _Function) -> _Function:
        def following(iterator: Any) -> Any:
            if (loop := session.timeline) is None:
                batch = original(iterator)
                session.guarded(lambda: session.loaded_early(batch))
                return batch
            if loop.thread != get_ident():
                return original(iterator)
            try:
                loop.loading()
            except Exception as error:
                session.failed(error)
            batch = original(iterator)
            try:
                loop.loaded(batch)
            except Exception as error:
                session.failed(error)
            return batch

        return following

    _replace(dataloader._BaseDataLoaderIter, "__next__", wrap)


def _optimizers(session: LoopSession) -> None:
    before, after = _around_step(session)
    optimizer.register_optimizer_step_pre_hook(before)
    optimizer.register_optimizer_step_post_hook(after)


def _scaler(session: LoopSession) -> None:
    before, after = _around_step(session)

    def wrap(original: _Function) -> _Function:
        def step(*arguments: Any, **named: Any) -> Any:
            before()
            answer = original(*arguments, **named)
            after()
            return answer

        return step

    _replace(torch.amp.GradScaler, "step", wrap)


def _around_step(session: LoopSession) -> tuple[Callable[..., None], Callable[..., None]]:
    def hook(report: Callable[[LoopTimeline], None], *, begins: bool) -> Callable[..., None]:
        def hooked(*_: object) -> None:
            if is_compiling():
                return
            if (loop := session.timeline) is None:
                session.steps_on = get_ident() if begins else 0
            elif loop.thread == get_ident():
                try:
                    report(loop)
                except Exception as error:
                    session.failed(error)

        return hooked

    return hook(LoopTimeline.stepping, begins=True), hook(LoopTimeline.stepped, begins=False)
