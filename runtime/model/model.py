"""A byte-level Llama: RMSNorm, rotary positions, SwiGLU, causal attention within each packed document.

A `Layer` is the unit that plans move: one transformer block, with the embedding in front of layer 0 and the final norm and
output head behind the last, or these two by themselves. A layer's initial weights depend on (seed, layer) alone, never on the
plan. A rank may have a part of it (tensor parallelism): whole attention heads, columns of the feed-forward network, tokens of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unskew.analytics.shards.parts import Part, Piece, ends_of, unit
from unskew.runtime.model.cuts import UNCUT, Cut
from unskew.runtime.model.tensor_parallel import Shard, TokensPart, cross_entropy, entered, looked_up, summed
from unskew.runtime.size import VOCABULARY, ModelSize

Deferred = list[tuple[nn.Parameter, Tensor, Tensor]]
"""What the gradients of weights still need: (weight, the layer's input, the gradient of its output), per linear layer."""


class Linear(nn.Linear):
    """A linear layer without bias whose weight's gradient can be computed later than its input's."""

    def reset_parameters(self) -> None:
        """Nothing: `build_layer` fills the weights."""

    def forward(self, x: Tensor, deferred: Deferred | None = None) -> Tensor:
        return product(x, self.weight, deferred)

    def by_columns(self, x: Tensor, tokens: int, deferred: Deferred | None, shard: Shard | None) -> Tensor:
        """What a part of it gives for all of so many tokens, of which a member has all, or its own."""
        if shard is not None and shard.sequence_parallel:
            return product(x, self.weight, deferred, TokensPart(shard, tokens))
        return product(entered(x, shard), self.weight, deferred)


def product(x: Tensor, weight: Tensor, deferred: Deferred | None = None, part: TokensPart | None = None) -> Tensor:
    """`x` times a weight. Its gradient is left to `weight_gradients` where there is a list for it; under autocast all that is
    multiplied is rounded, and the weight and the sum of its gradients are not. `part`: `x` is of a member's tokens, the product
    of all."""
    rounded = torch.is_autocast_enabled(x.device.type)
    if deferred is None and not rounded and part is None:
        return functional.linear(x, weight)
    x = x.to(torch.get_autocast_dtype(x.device.type)) if rounded else x
    y: Tensor = _Product.apply(x, weight, deferred, part)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    """A linear layer's backward pass in two: the input's gradient now, what the weight's needs into a list; or both at once.

    Autograd's own method (a graph walked twice) costs 14 to 18 % more CPU time than an undivided backward pass, this 3 to 5 %.
    Autograd's own rounding would keep a rounded weight for each micro-batch in flight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, deferred: Deferred | None, part: TokensPart | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.part = deferred, part
        return functional.linear(x if part is None else part.all_of(x), weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight.to(dy.dtype)
        if ctx.part is not None:
            x, dx = ctx.part.all_of(x), ctx.part.shard.sum_tokens(dx)
        if ctx.deferred is None:
            return dx, _weight_gradient(weight, x, dy), None, None
        ctx.deferred.append((weight, x.detach(), dy))
        return dx, None, None, None


def _weight_gradient(weight: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    return (dy.flatten(0, -2).T @ x.flatten(0, -2)).to(weight.dtype)


def weight_gradients(deferred: Deferred) -> None:
    """Add the weights' gradients that a backward pass left; empties the list."""
    for weight, x, dy in deferred:
        if weight.grad is None:
            weight.grad = _weight_gradient(weight, x, dy)
        elif weight.dtype == dy.dtype:  # added while it is computed: a sum of its own would be written and read once more
            weight.grad.addmm_(dy.flatten(0, -2).T, x.flatten(0, -2))
        else:
            weight.grad.add_(_weight_gradient(weight, x, dy))
    deferred.clear()


class Layer(nn.Module):
    """One block, or what comes before or behind all of them. Input: byte values [tokens] for layer 0, else hidden states
    [tokens, dim]; output: hidden states or logits.

    `part`: this rank has these heads, columns and tokens of the vocabulary alone; then `forward` needs the group that has the
    others, and the logits are those of its own tokens.
    """

    def __init__(self, size: ModelSize, layer: int, part: Part | None = None) -> None:
        super().__init__()
        self.width = size.dim // size.heads
        self.heads, ffn, tokens = (len(units_of(part, whole)) for whole in (size.heads, size.ffn, VOCABULARY))
        self.vocabulary = units_of(part, VOCABULARY)
        self.embedding = nn.Embedding(tokens, size.dim) if layer == 0 else None
        self.has_block = size.has_block(layer)
        if self.has_block:
            self.attention_norm = nn.Parameter(torch.ones(size.dim))
            self.qkv = Linear(size.dim, 3 * self.heads * self.width, bias=False)
            self.out = Linear(self.heads * self.width, size.dim, bias=False)
            self.ffn_norm = nn.Parameter(torch.ones(size.dim))
            self.gate_up = Linear(size.dim, 2 * ffn, bias=False)
            self.down = Linear(ffn, size.dim, bias=False)
        last = size.has_head(layer)
        self.final_norm = nn.Parameter(torch.ones(size.dim)) if last else None
        self.head = Linear(size.dim, tokens, bias=False) if last else None

    def forward(
        self, x: Tensor, lengths: Sequence[int], deferred: Deferred | None = None, shard: Shard | None = None
    ) -> Tensor:
        """`deferred`: the backward pass leaves the gradients of the linear layers' weights to `weight_gradients`, which takes
        what it adds to this list. `shard`: this rank's place in the group that has the whole layer, where it has a part; where
        that is sequence-parallel, hidden states are of its tokens."""
        tokens = sum(lengths)
        if self.embedding is not None:
            x = self.embedding(x) if shard is None else looked_up(x, self.embedding.weight, self.vocabulary, shard)
        if self.has_block:
            qkv = self.qkv.by_columns(_rms_norm(x, self.attention_norm), tokens, deferred, shard)
            x = x + summed(self.out(self._attend(qkv, lengths), deferred), shard)
            gate, up = self.gate_up.by_columns(_rms_norm(x, self.ffn_norm), tokens, deferred, shard).chunk(2, dim=-1)
            x = x + summed(self.down(functional.silu(gate) * up, deferred), shard)
        if self.head is None or self.final_norm is None:
            return x
        return self.head.by_columns(_rms_norm(x, self.final_norm), tokens, deferred, shard)

    def loss(self, y: Tensor, targets: Tensor, shard: Shard | None = None) -> Tensor:
        """The sum over the tokens."""
        return cross_entropy(y, targets, self.vocabulary, shard)

    def _attend(self, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        # A loop over documents: a block-diagonal mask would cost tokens^2, and no variable-length kernel runs on CPU.
        tokens = len(qkv)
        qkv = qkv.view(tokens, 3, self.heads, self.width)
        if self.heads == 0:  # of a small part of few heads
            return qkv.reshape(tokens, 0)
        cos, sin = _rotary_tables(tuple(lengths), self.width, qkv.dtype, qkv.device)
        query, key = _rotate(qkv[:, :2], cos, sin).unbind(1)
        # One leading dimension for the batch: only so does the fast CPU kernel take them.
        documents = [torch.split(part.transpose(0, 1)[None], list(lengths), dim=2) for part in (query, key, qkv[:, 2])]
        attended = [
            functional.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in zip(*documents, strict=True)
        ]
        return torch.cat(attended, dim=2)[0].transpose(0, 1).reshape(tokens, self.heads * self.width)


def units_of(part: Part | None, whole: int) -> range:
    """Which of `whole` heads, columns or tokens a part has."""
    low, high = ends_of(part)
    return range(unit(low, whole), unit(high, whole))


def build_layer(
    size: ModelSize, layer: int, *, seed: int | None, dtype: torch.dtype, device: torch.device, part: Part | None = None
) -> Layer:
    """Layer `layer`, or a part of it, with its initial weights, the same for every plan and device: normal, 0.02, from (seed,
    layer); without a `seed` a place for weights that come from elsewhere."""
    if seed is None:
        return Layer(size, layer, part).to(dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed * 100_003 + layer)
    whole = Layer(size, layer)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
        module = whole if part is None else Layer(size, layer, part)
        for (name, parameter), mine in zip(whole.named_parameters(), module.parameters(), strict=True) if part else ():
            mine.copy_(cut_of(name, size).view(parameter, None, Piece(layer, *ends_of(part))).reshape(mine.shape))
    return module.to(dtype=dtype, device=device)


def cut_of(name: str, size: ModelSize) -> Cut:
    """How the weight of this name is cut among the members of a tensor-parallel group."""
    cuts = {
        "embedding.weight": Cut(1, VOCABULARY),
        "qkv.weight": Cut(3, size.heads),
        "out.weight": Cut(size.dim, size.heads),
        "gate_up.weight": Cut(2, size.ffn),
        "down.weight": Cut(size.dim, size.ffn),
        "head.weight": Cut(1, VOCABULARY),
    }
    return cuts.get(name, UNCUT)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)


@lru_cache(maxsize=256)
def _rotary_tables(lengths: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, 1, width / 2]; positions restart at each document. Cached: a chunk's layers share them."""
    positions = torch.cat([torch.arange(length, dtype=torch.float64) for length in lengths]).to(device)
    frequencies = (10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)).to(device)
    angles = torch.outer(positions, frequencies)[:, None, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.chunk(2, dim=-1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
