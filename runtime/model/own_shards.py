"""How modules of somebody's own model are cut among the members of a tensor-parallel group: they name it.

A layer with a method `shards()` names submodules of its own and how each is cut; all else every member has and computes alike.
What comes between a linear layer that is cut by `ColumnCut` and the next one by `RowCut` sees a part of the heads or columns. A
method `cut_to(count)` is called once a part is taken, where the layer keeps sizes: `count(units)` of so many units are here.
The groups' sums are ours (tensor_parallel.py): before `ColumnCut`, once for all that take the same input, and behind `RowCut`.

    class Block(nn.Module):
        def shards(self):
            return {"qkv": ColumnCut(8, times=3), "out": RowCut(8), "up": ColumnCut(64), "down": RowCut(64)}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import torch
from torch import Tensor, nn

from unskew.analytics.shards.parts import Part, Piece, ends_of, unit
from unskew.runtime.model.cuts import UNCUT, Cut
from unskew.runtime.model.model import Deferred, product, units_of
from unskew.runtime.model.tensor_parallel import Shard, entered, looked_up, summed
from unskew.runtime.own import OwnError, asking


class ColumnCut(msgspec.Struct, frozen=True):
    """An `nn.Linear` that is cut by what it gives: `units` (heads, columns), `times` over (3: queries, keys, values)."""

    units: int
    times: int = 1


class RowCut(msgspec.Struct, frozen=True):
    """An `nn.Linear` that is cut by what it takes, in `units`; the members' products are summed, the bias comes after."""

    units: int


class VocabularyCut(msgspec.Struct, frozen=True):
    """An `nn.Embedding`, or the last `nn.Linear` of the last layer, that is cut by tokens; so is the loss then."""


class PerUnit(msgspec.Struct, frozen=True):
    """A module without cut parameters that is applied to each unit that a member has, as a norm of each head: the members'
    gradients are summed."""


Sharding = ColumnCut | RowCut | VocabularyCut | PerUnit


class ShardPass(msgspec.Struct, eq=False):
    """A pass of a layer through a group: `shard`, and what entered last, so that several that take it alike share its sum."""

    shard: Shard
    given: Tensor | None = None
    taken: Tensor | None = None

    def entered(self, x: Tensor) -> Tensor:
        """`x`, for a layer of which a member has a part."""
        if self.taken is None or self.given is not x:
            self.given, self.taken = x, entered(x, self.shard)
        return self.taken


class CutLinear(nn.Linear):
    """What `nn.Linear`s become: the gradient of the weight can be left for later, and the weight be a part."""

    deferred: Deferred | None = None
    sharding: Sharding | None = None
    passing: ShardPass | None = None

    def forward(self, x: Tensor) -> Tensor:
        passing = self.passing
        if self.deferred is None and passing is None:
            return super().forward(x)
        if passing is not None and isinstance(self.sharding, ColumnCut | VocabularyCut):
            x = passing.entered(x)
        y = product(x, self.weight, self.deferred)
        if passing is not None and isinstance(self.sharding, RowCut):
            y = summed(y, passing.shard)
        return y if self.bias is None else y + self.bias


class CutEmbedding(nn.Embedding):
    """What an `nn.Embedding` becomes that is cut by tokens."""

    passing: ShardPass | None = None
    vocabulary: range = range(0)

    def forward(self, ids: Tensor) -> Tensor:
        if self.passing is None:
            return super().forward(ids)
        return looked_up(ids, self.weight, self.vocabulary, self.passing.shard)


def named_shards(module: nn.Module, where: str) -> dict[str, tuple[nn.Module, Sharding]]:
    """Name -> the submodule and how it is cut, as the layer `where` says. Raises `OwnError`."""
    with asking(f"{where}: shards() failed"):
        named: Mapping[str, Sharding] = dict(module.shards()) if hasattr(module, "shards") else {}  # type: ignore[operator]
    submodules, found = dict(module.named_modules()), dict[str, tuple[nn.Module, Sharding]]()
    for name, sharding in named.items():
        of = submodules.get(name)
        if of is None or not isinstance(sharding, Sharding):
            raise OwnError(f"{where}: shards() has {name}: {sharding}, allowed: ColumnCut, RowCut, ... of a submodule")
        if not isinstance(sharding, PerUnit) and (wrong := _misfit(of, sharding)):
            raise OwnError(f"{where}: shards() cuts {name} by {sharding}, allowed: {wrong}")
        found[name] = of, sharding
    return found


def _misfit(of: nn.Module, sharding: Sharding) -> str:
    """What would be right instead; "" where it is."""
    if type(of) is nn.Embedding and of.max_norm is None and not of.scale_grad_by_freq:
        return "" if isinstance(sharding, VocabularyCut) else "VocabularyCut of an nn.Embedding"
    if not isinstance(of, CutLinear) or "bias" in dict(of.named_buffers()):
        return "an nn.Linear that is trained, or an nn.Embedding"
    if isinstance(sharding, ColumnCut):
        whole, units = of.out_features, sharding.units * sharding.times
    else:
        whole, units = (of.in_features, sharding.units) if isinstance(sharding, RowCut) else (of.out_features, of.out_features)
    return "" if units > 0 and whole % units == 0 else f"units that divide {whole}"


def cuts_of(name: str, of: nn.Module, sharding: Sharding) -> dict[str, Cut]:
    """Parameter -> how it is cut."""
    if isinstance(sharding, PerUnit):
        return {}
    weight = dict(of.named_parameters())["weight"]
    rows = len(weight)
    if isinstance(sharding, RowCut):
        return {f"{name}.weight": Cut(rows, sharding.units)}
    cut = Cut(sharding.times, sharding.units) if isinstance(sharding, ColumnCut) else Cut(1, rows)
    return {f"{name}.weight": cut, f"{name}.bias": cut}


def take_part(
    layer: nn.Module, shards: Mapping[str, tuple[nn.Module, Sharding]], part: Part, group: Callable[[], Shard]
) -> None:
    """Leave a part of a layer's cut weights in it; `group`: the one that it goes through now."""
    for name, (of, sharding) in shards.items():
        cuts = cuts_of(name, of, sharding)
        for kind, parameter in list(of.named_parameters(recurse=False)):
            cut = cuts.get(f"{name}.{kind}", UNCUT)
            if cut != UNCUT:
                own = cut.view(parameter.detach(), None, Piece(0, *ends_of(part)))
                shape = [*parameter.shape]
                shape[isinstance(sharding, RowCut)] = -1
                setattr(of, kind, nn.Parameter(own.reshape(shape).clone()))
        if isinstance(of, CutEmbedding):
            of.vocabulary = units_of(part, of.num_embeddings)
        if isinstance(sharding, PerUnit):
            for parameter in of.parameters():
                parameter.register_hook(partial(_over_units, group))  # type: ignore[no-untyped-call]
    if hasattr(layer, "cut_to"):
        layer.cut_to(partial(_count, part))  # type: ignore[operator]


def _over_units(group: Callable[[], Shard], gradient: Tensor) -> Tensor:
    return group().sum(gradient.contiguous().clone())


def _count(part: Part, units: int) -> int:
    low, high = ends_of(part)
    return unit(high, units) - unit(low, units)


class LoneMember(Shard):
    """A group of one: what a member keeps of a part is measured with it, and of how many `tokens` sums are asked."""

    def __init__(self, tokens: int = 0) -> None:
        self.tokens, self.sums = tokens, 0

    def sum(self, tensor: Tensor) -> Tensor:
        self.sums += tensor.dim() > 1 and len(tensor) == self.tokens  # of hidden states, not of a parameter's gradient
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor])

    def sum_tokens(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_tokens(self, own: Tensor, tokens: int) -> Tensor:
        return own[:tokens]
