"""How large our own model is: known without torch, which the controller need not load."""

from __future__ import annotations

import msgspec

VOCABULARY = 256


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """`dim` and `heads` as in Llama; the feed-forward width is the usual 8/3 dim, rounded up to a multiple of 16."""

    n_layers: int
    dim: int
    heads: int

    @property
    def ffn(self) -> int:
        return -(-8 * self.dim // 3 // 16) * 16

    def activations(self, layer: int) -> tuple[int, int]:
        """Elements that a layer keeps of each token until its backward pass: those that all members of a tensor-parallel group
        have, and those that they divide. Rotary tables are shared by all."""
        last = layer == self.n_layers - 1
        whole = 6 * self.dim + 2 + (3 * self.dim + 3 if last else 0)
        return whole, 7 * self.dim + 4 * self.ffn + self.heads + (VOCABULARY if last else 0)

    def parameters(self, layer: int) -> int:
        """How many a whole layer has: its block, and what comes before the first and behind the last (model.py)."""
        block = 4 * self.dim * self.heads * (self.dim // self.heads) + 3 * self.dim * self.ffn + 2 * self.dim
        embedding = VOCABULARY * self.dim if layer == 0 else 0
        return block + embedding + ((VOCABULARY + 1) * self.dim if layer == self.n_layers - 1 else 0)
