"""A byte-level Llama: RMSNorm, rotary positions, SwiGLU, causal attention within each packed document.

A `Layer` is the unit that plans move: one transformer block, with the embedding in front of layer 0 and the final norm and
output head behind the last. A layer's initial weights depend on (seed, layer) alone, never on the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """`dim` and `heads` as in Llama; the feed-forward width is the usual 8/3 dim, rounded up to a multiple of 16."""

    n_layers: int
    dim: int
    heads: int

    @property
    def ffn(self) -> int:
        return -(-8 * self.dim // 3 // 16) * 16


class Layer(nn.Module):
    """One block. Input: byte values [tokens] for layer 0, else hidden states [tokens, dim]; output: hidden states or logits."""

    def __init__(self, size: ModelSize, layer: int) -> None:
        super().__init__()
        self.heads = size.heads
        self.embedding = nn.Embedding(VOCABULARY, size.dim) if layer == 0 else None
        self.attention_norm = nn.Parameter(torch.ones(size.dim))
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(size.dim))
        self.gate_up = nn.Linear(size.dim, 2 * size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.dim, bias=False)
        last = layer == size.n_layers - 1
        self.final_norm = nn.Parameter(torch.ones(size.dim)) if last else None
        self.head = nn.Linear(size.dim, VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = x + self.out(self._attend(_rms_norm(x, self.attention_norm), lengths))
        gate, up = self.gate_up(_rms_norm(x, self.ffn_norm)).chunk(2, dim=-1)
        x = x + self.down(functional.silu(gate) * up)
        if self.head is not None and self.final_norm is not None:
            x = self.head(_rms_norm(x, self.final_norm))
        return x

    def _attend(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        # A loop over documents: a block-diagonal mask would cost tokens^2, and no variable-length kernel runs on CPU.
        tokens, dim = x.shape
        qkv = self.qkv(x).view(tokens, 3, self.heads, dim // self.heads)
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
