"""A byte-level Llama: RMSNorm, rotary positions, SwiGLU, causal attention within each packed document.

A `Layer` is the unit that plans move: one transformer block, with the embedding in front of layer 0 and the final norm and
output head behind the last. A layer's initial weights depend on (seed, layer) alone, never on the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256

Deferred = list[tuple[nn.Parameter, Tensor, Tensor]]
"""What the gradients of weights still need: (weight, the layer's input, the gradient of its output), per linear layer."""


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """`dim` and `heads` as in Llama; the feed-forward width is the usual 8/3 dim, rounded up to a multiple of 16."""

    n_layers: int
    dim: int
    heads: int

    @property
    def ffn(self) -> int:
        return -(-8 * self.dim // 3 // 16) * 16


class Linear(nn.Linear):
    """A linear layer without bias whose weight's gradient can be computed later than its input's."""

    def forward(self, x: Tensor, deferred: Deferred | None = None) -> Tensor:
        if deferred is None:
            return functional.linear(x, self.weight)
        y: Tensor = _InputGradientOnly.apply(x, self.weight, deferred)  # type: ignore[no-untyped-call]
        return y


class _InputGradientOnly(torch.autograd.Function):
    """A linear layer's backward pass in two: the input's gradient now, what the weight's needs into a list.

    Autograd's own method (a graph walked twice) costs 14 to 18 % more CPU time than an undivided backward pass, this 3 to 5 %.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, deferred: Deferred) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred = deferred
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.deferred.append((weight, x.detach(), dy))
        return dy @ weight, None, None


def weight_gradients(deferred: Deferred) -> None:
    """Add the weights' gradients that a backward pass left; empties the list."""
    for weight, x, dy in deferred:
        gradient = dy.flatten(0, -2).T @ x.flatten(0, -2)
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
    deferred.clear()


class Layer(nn.Module):
    """One block. Input: byte values [tokens] for layer 0, else hidden states [tokens, dim]; output: hidden states or logits."""

    def __init__(self, size: ModelSize, layer: int) -> None:
        super().__init__()
        self.heads = size.heads
        self.embedding = nn.Embedding(VOCABULARY, size.dim) if layer == 0 else None
        self.attention_norm = nn.Parameter(torch.ones(size.dim))
        self.qkv = Linear(size.dim, 3 * size.dim, bias=False)
        self.out = Linear(size.dim, size.dim, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(size.dim))
        self.gate_up = Linear(size.dim, 2 * size.ffn, bias=False)
        self.down = Linear(size.ffn, size.dim, bias=False)
        last = layer == size.n_layers - 1
        self.final_norm = nn.Parameter(torch.ones(size.dim)) if last else None
        self.head = Linear(size.dim, VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor, lengths: Sequence[int], deferred: Deferred | None = None) -> Tensor:
        """`deferred`: the backward pass leaves the gradients of the linear layers' weights to `weight_gradients`, which takes
        what it adds to this list."""
        if self.embedding is not None:
            x = self.embedding(x)
        x = x + self.out(self._attend(_rms_norm(x, self.attention_norm), lengths, deferred), deferred)
        gate, up = self.gate_up(_rms_norm(x, self.ffn_norm), deferred).chunk(2, dim=-1)
        x = x + self.down(functional.silu(gate) * up, deferred)
        if self.head is not None and self.final_norm is not None:
            x = self.head(_rms_norm(x, self.final_norm), deferred)
        return x

    def _attend(self, x: Tensor, lengths: Sequence[int], deferred: Deferred | None) -> Tensor:
        # A loop over documents: a block-diagonal mask would cost tokens^2, and no variable-length kernel runs on CPU.
        tokens, dim = x.shape
        qkv = self.qkv(x, deferred).view(tokens, 3, self.heads, dim // self.heads)
        cos, sin = _rotary_tables(tuple(lengths), dim // self.heads, x.dtype, x.device)
        query, key = _rotate(qkv[:, 0], cos, sin), _rotate(qkv[:, 1], cos, sin)
        # One leading dimension for the batch: only so does the fast CPU kernel take them.
        documents = [part.transpose(0, 1)[None].split(list(lengths), dim=2) for part in (query, key, qkv[:, 2])]
        attended = [
            functional.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in zip(*documents, strict=True)
        ]
        return torch.cat(attended, dim=2)[0].transpose(0, 1).reshape(tokens, dim)


def build_layer(size: ModelSize, layer: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> Layer:
    """Layer `layer` with its initial weights, the same for every plan and device: normal, 0.02, from (seed, layer)."""
    generator = torch.Generator().manual_seed(seed * 100_003 + layer)
    module = Layer(size, layer)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
    return module.to(dtype=dtype, device=device)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)


@lru_cache(maxsize=256)
def _rotary_tables(lengths: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, width / 2]; positions restart at each document. Cached: a chunk's layers share them."""
    positions = torch.cat([torch.arange(length, dtype=torch.float64) for length in lengths])
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(positions, frequencies)[:, None, :]
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.chunk(2, dim=-1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
