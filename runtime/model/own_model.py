"""A model of somebody's own: a list of modules, each called with the hidden states of one packed micro-batch.

The function that `--model` names returns the modules, in order. The first takes token ids [tokens]; each gives [tokens, ...] to
the next; the last gives what the loss takes, logits [tokens, vocabulary] unless it has a method `loss(y, targets)` of its own:
the sum over the tokens. A module whose `forward` takes a second argument is given the documents' lengths, too. Layers share no
parameters: what is tied has to be untied. Each rank copies the layers that it holds from this one, so initial weights are a
function of the seed alone. How it is cut among ranks a module says itself (own_shards.py).
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unskew.analytics.shards.parts import Part, size_of
from unskew.analytics.shards.together import LayerSums
from unskew.runtime.data import load_data
from unskew.runtime.model.batch import drawn
from unskew.runtime.model.cuts import Cut
from unskew.runtime.model.model import Deferred, units_of
from unskew.runtime.model.own_shards import (
    ColumnCut,
    CutEmbedding,
    CutLinear,
    LoneMember,
    RowCut,
    ShardPass,
    VocabularyCut,
    cuts_of,
    named_shards,
    take_part,
)
from unskew.runtime.model.tensor_parallel import Shard, cross_entropy
from unskew.runtime.options import RunOptions
from unskew.runtime.own import OwnError, asking, function_of
from unskew.runtime.size import ModelSize


class OwnLayer(nn.Module):
    """One module of such a model, as a layer that ranks hold. Frozen parameters become buffers."""

    def __init__(self, module: nn.Module, where: str) -> None:
        """`where`: its name in messages. Raises `OwnError`."""
        super().__init__()
        self.module = module
        self._takes_lengths = len(inspect.signature(module.forward).parameters) > 1
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    delattr(part, name)
                    part.register_buffer(name, parameter.data)
            if type(part) is nn.Linear and isinstance(part.weight, nn.Parameter):
                part.__class__ = CutLinear
        self._linears = [part for part in module.modules() if isinstance(part, CutLinear)]
        self._shards = named_shards(module, where)
        for part, sharding in self._shards.values():
            if isinstance(part, CutLinear):
                part.sharding = sharding
            elif isinstance(sharding, VocabularyCut):
                part.__class__ = CutEmbedding
        self._shard: Shard | None = None
        self._vocabulary: range | None = None

    def forward(
        self, x: Tensor, lengths: Sequence[int], deferred: Deferred | None = None, shard: Shard | None = None
    ) -> Tensor:
        """As `Layer.forward`: the gradients of `nn.Linear`'s weights are left for later."""
        self._shard, passing = shard, ShardPass(shard) if shard is not None and self._shards else None
        for linear in self._linears:
            linear.deferred = deferred
        for part, _ in self._shards.values():
            if isinstance(part, CutLinear | CutEmbedding):
                part.passing = passing
        y: Tensor = self.module(x, lengths) if self._takes_lengths else self.module(x)
        if passing is not None:
            passing.given = passing.taken = None  # else they would live to the next pass
        return y

    def loss(self, y: Tensor, targets: Tensor, shard: Shard | None = None) -> Tensor:
        """The sum over the tokens."""
        own = getattr(self.module, "loss", None)
        if own is not None:
            summed: Tensor = own(y, targets)
            return summed
        if self._vocabulary is None:
            return functional.cross_entropy(y, targets, reduction="sum")
        return cross_entropy(y, targets, self._vocabulary, shard)

    @property
    def cuts(self) -> dict[str, Cut]:
        """Parameter -> how it is cut; others every member has."""
        return {
            f"module.{name}": cut
            for prefix, (part, sharding) in self._shards.items()
            for name, cut in cuts_of(prefix, part, sharding).items()
        }

    @property
    def units(self) -> int:
        """In how many it can be cut at most; 0 = it is not cut."""
        return min(
            (sharding.units for _, sharding in self._shards.values() if isinstance(sharding, ColumnCut | RowCut)), default=0
        )

    @property
    def head(self) -> CutLinear | None:
        """The output head, where it is cut by tokens."""
        of = (part for part, sharding in self._shards.values() if isinstance(sharding, VocabularyCut))
        return next((part for part in of if isinstance(part, CutLinear)), None)

    def take(self, part: Part) -> None:
        """Leave a part of it here."""
        if (head := self.head) is not None:
            self._vocabulary = units_of(part, head.out_features)
        take_part(self.module, self._shards, part, self._group)

    def _group(self) -> Shard:
        assert self._shard is not None
        return self._shard


class OwnModel:
    """The whole model, once, for ranks to copy from."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Raises `OwnError`."""
        self.layers = [OwnLayer(module, f"layer {number} of --model") for number, module in enumerate(modules)]
        heads = [number for number, layer in enumerate(self.layers) if layer.head is not None]
        if heads not in ([], [self.n_layers - 1]) or (heads and hasattr(self.layers[-1].module, "loss")):
            raise OwnError(
                f"layer {heads[0]} of --model cuts an nn.Linear by VocabularyCut, allowed: the last, without its own loss"
            )

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def parameters(self, layer: int) -> int:
        """How many a layer has."""
        return sum(parameter.numel() for parameter in self.layers[layer].parameters())

    @property
    def units(self) -> int:
        """In how many the layers can be cut among the members of a tensor-parallel group; 0 = none names its shards."""
        return min((units for layer in self.layers if (units := layer.units)), default=0)

    def build(self, layer: int, *, dtype: torch.dtype, device: torch.device, part: Part | None = None) -> OwnLayer:
        """A copy of one layer, or of a part of it, with its initial weights."""
        copied = copy.deepcopy(self.layers[layer]).to(dtype=dtype, device=device)
        if part is not None:
            copied.take(part)
        return copied

    def check(self, ids: Tensor, targets: Tensor, lengths: Sequence[int]) -> None:
        """Raises `OwnError` unless a micro-batch gives a loss that can be learned from."""
        last, number = self.layers[-1], self.n_layers - 1
        if not any(map(self.parameters, range(self.n_layers))):
            raise OwnError("no layer of --model has a parameter to train, allowed: one or more that require gradients")
        with _one_thread():
            y, _ = self._passed(ids, lengths)[-1]
            with asking(f"the loss of layer {number} of --model cannot take {_shown(y)} and targets {_shown(targets)}"):
                y = y.detach().requires_grad_(y.is_floating_point())
                loss = last.loss(y, targets)
            if not isinstance(loss, Tensor) or loss.dim() > 0 or not loss.is_floating_point():
                raise OwnError(f"the loss of layer {number} of --model gives {_shown(loss)}, allowed: the sum over the tokens")
            if not torch.isfinite(loss):
                raise OwnError(f"the first loss of --model is {loss.item()}, allowed: a finite number")
            with asking(f"the backward pass of the loss of layer {number} of --model failed"):
                loss.backward()  # type: ignore[no-untyped-call]

    def shapes(self, ids: Tensor, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """What each layer gives to the next for every token. Raises `OwnError`."""
        return tuple(tuple(y.shape[1:]) for y, _ in self._passed(ids, lengths))

    def kept(self, ids: Tensor, targets: Tensor, lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many numbers of the model's format each layer keeps of a token for its backward pass, parameters left out; the
        last one with the loss: those that all members of a tensor-parallel group have, and those that they divide."""
        whole = self._kept(self.layers, ids, targets, lengths, None)
        if self.units < 2:
            return tuple(whole), (0,) * len(whole)
        of_half = self._kept(self._halves(ids.device), ids, targets, lengths, LoneMember())
        lacking = [max(count - own, 0) for count, own in zip(whole, of_half, strict=True)]
        divided = [min(round(less / (1 - size_of(self._half))), count) for less, count in zip(lacking, whole, strict=True)]
        return tuple(count - cut for count, cut in zip(whole, divided, strict=True)), tuple(divided)

    def sums(self, ids: Tensor, lengths: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> LayerSums:
        """How many sums of what is of its tokens each layer has in a tensor-parallel group: forward, backward. `shapes`: what
        whole layers give. Raises `OwnError` where a part of a layer cannot be executed or gives something else."""
        if self.units < 2:
            return ()
        member, found, x = LoneMember(len(ids)), list[tuple[int, int]](), ids
        with _one_thread():
            for number, layer in enumerate(self._halves(ids.device)):
                x = x.detach().requires_grad_(x.is_floating_point())
                before = member.sums
                with asking(f"half of layer {number} of --model cannot take {_shown(x)}"):
                    x = layer(x, lengths, None, member)
                    between = member.sums
                    if x.requires_grad:
                        torch.autograd.backward(x, torch.ones_like(x))
                if layer.head is None and x.shape[1:] != shapes[number]:
                    whole = [len(ids), *shapes[number]]
                    raise OwnError(f"half of layer {number} of --model gives {_shown(x)}, allowed: {whole} as the whole layer")
                found.append((between - before, member.sums - between))
        return tuple(found)

    @property
    def _half(self) -> Part:
        return Part(0, self.units // 2, self.units)

    def _halves(self, device: torch.device) -> list[OwnLayer]:
        """Half of each layer."""
        dtype = torch.get_default_dtype()
        with asking("--model cannot be cut among the members of a group"):
            return [self.build(layer, dtype=dtype, device=device, part=self._half) for layer in range(self.n_layers)]

    def _kept(
        self, layers: Sequence[OwnLayer], ids: Tensor, targets: Tensor, lengths: Sequence[int], shard: Shard | None
    ) -> list[int]:
        found, x = list[int](), ids
        with _one_thread():
            for layer in layers:
                own = {one.untyped_storage().data_ptr() for one in (*layer.parameters(), *layer.buffers())}
                saved: dict[int, Tensor] = {}
                x = x.detach().requires_grad_(x.is_floating_point())
                with torch.autograd.graph.saved_tensors_hooks(partial(_noted, saved), lambda tensor: tensor):
                    x = layer(x, lengths, None, shard)
                    if layer is layers[-1]:
                        layer.loss(x, targets, shard)
                n_bytes = sum(one.untyped_storage().nbytes() for key, one in saved.items() if key not in own)
                found.append(math.ceil(n_bytes / (len(ids) * x.element_size())))
        return found

    def weights(self, ids: Tensor, lengths: Sequence[int], repeats: int = 5) -> tuple[float, ...]:
        """The work of each layer, 1 in the mean, measured: the least of this thread's times for forward and backward."""
        with _one_thread():
            took = [[us for _, us in self._passed(ids, lengths, backward=True)] for _ in range(1 + repeats)][1:]
        of_layer = [max(min(column), 1.0) for column in zip(*took, strict=True)]
        return tuple(round(us * len(of_layer) / sum(of_layer), 3) for us in of_layer)

    def _passed(self, ids: Tensor, lengths: Sequence[int], *, backward: bool = False) -> list[tuple[Tensor, float]]:
        """(output, us) of each layer for one micro-batch."""
        x, found = ids, list[tuple[Tensor, float]]()
        for number, layer in enumerate(self.layers):
            x = x.detach()
            if x.is_floating_point() and backward:
                x.requires_grad_(True)
            begun = time.thread_time()
            with asking(f"layer {number} of --model cannot take {list(x.shape)}"), torch.set_grad_enabled(backward):
                y = layer(x, lengths)
            if not isinstance(y, Tensor) or y.dim() < 1 or len(y) != len(ids):
                raise OwnError(f"layer {number} of --model gives {_shown(y)}, allowed: a tensor [{len(ids)} tokens, ...]")
            if backward and y.requires_grad:
                with asking(f"the backward pass of layer {number} of --model failed"):
                    torch.autograd.backward(y, torch.ones_like(y))
                layer.zero_grad(set_to_none=True)
            found.append((y, 1e6 * (time.thread_time() - begun)))
            x = y
        return found


def _shown(given: object) -> str:
    """What somebody's code gave, in a message."""
    return str(list(given.shape)) if isinstance(given, Tensor) else type(given).__name__


def _noted(saved: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """A tensor that is kept for a backward pass, once for each memory."""
    return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())


@contextmanager
def _one_thread() -> Iterator[None]:
    """As ranks compute; and a process that will fork must not have started threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def own_model(spec: str, seed: int) -> OwnModel:
    """The model that `spec` names, with the weights of this seed; once per process and its forks. Raises `OwnError`."""
    build = function_of(spec)
    with asking(f"--model {spec} failed"), _one_thread():
        torch.manual_seed(seed)
        modules = build()
    listed = isinstance(modules, list | tuple | nn.ModuleList | nn.Sequential) and len(modules) > 0
    if not listed or not all(isinstance(one, nn.Module) for one in modules):
        raise OwnError(f"--model {spec} gives {type(modules).__name__}, allowed: a list of nn.Modules, one for each layer")
    owners: dict[int, int] = {}
    for number, module in enumerate(modules):
        for parameter in module.parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise OwnError(
                    f"--model {spec}: layers {owners[id(parameter)]} and {number} share a parameter, allowed: each has its own"
                )
    return OwnModel(list(modules))


def model_of(options: RunOptions) -> ModelSize | OwnModel:
    """What the run trains. Raises `OwnError`."""
    if options.model is not None:
        return own_model(options.model, options.seed)
    return options.size


def measured(options: RunOptions) -> RunOptions:
    """The options with what is measured of a model of somebody's own on a micro-batch of the data: how many layers it has, what
    each costs and what it gives to the next. Raises `OwnError`, `CorpusError`, `PackingError`."""
    model, data = model_of(options), load_data(options)
    first = drawn(data, options, 0)
    micro_batch = sorted(first, key=lambda documents: sum(map(data.length, documents)))[len(first) // 2]
    lengths = [data.length(document) for document in micro_batch]
    if not isinstance(model, OwnModel):
        return options
    ids, targets = (
        torch.from_numpy(np.concatenate([data.document(document)[part] for document in micro_batch]).astype(np.int64))
        for part in (slice(-1), slice(1, None))
    )
    if options.tp > max(model.units, 1):
        allowed = f"{model.units} or less" if model.units else "1, for no layer names its shards"
        raise OwnError(f"{options.asked_degree} is too large for --model {options.model}, allowed: {allowed}")
    model.check(ids, targets, lengths)
    shapes = model.shapes(ids, lengths)
    sums = options.layer_sums or model.sums(ids, lengths, shapes)
    weights = options.layer_weights or model.weights(ids, lengths)
    kept, kept_cut = (options.kept, options.kept_cut) if options.kept else model.kept(ids, targets, lengths)
    return msgspec.structs.replace(
        options, layers=model.n_layers, layer_weights=weights, shapes=shapes, kept=kept, kept_cut=kept_cut, units=model.units,
        layer_sums=sums,
    )  # fmt: skip
