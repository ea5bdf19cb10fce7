"""How large our own model is: known without torch, which the controller need not load."""

from __future__ import annotations

import msgspec

from unskew.analytics.shards.together import LayerSums

VOCABULARY = 256
_EMBEDDING = 0.01
"""What an embedding costs that is a layer of its own, of a block: it has no products."""


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """`dim` and `heads` as in Llama; the feed-forward width is the usual 8/3 dim, rounded up to a multiple of 16. The first
    layer has the embedding and the last one the output head, beside their blocks or, `ends_apart`, alone."""

    n_layers: int
    dim: int
    heads: int
    ends_apart: bool = False

    @property
    def ffn(self) -> int:
        return -(-8 * self.dim // 3 // 16) * 16

    def has_block(self, layer: int) -> bool:
        return not self.ends_apart or 0 < layer < self.n_layers - 1

    def has_head(self, layer: int) -> bool:
        return layer == self.n_layers - 1

    def activations(self, layer: int) -> tuple[int, int]:
        """Elements that a layer keeps of each token until its backward pass: those that all members of a tensor-parallel group
        have, and those that they divide. Rotary tables are shared by all."""
        whole, cut = (6 * self.dim + 2, 7 * self.dim + 4 * self.ffn + self.heads) if self.has_block(layer) else (0, 0)
        return (whole + 3 * self.dim + 3, cut + VOCABULARY) if self.has_head(layer) else (whole, cut)

    def parameters(self, layer: int) -> int:
        """How many a whole layer has (model.py)."""
        block = self._products + 2 * self.dim if self.has_block(layer) else 0
        embedding = VOCABULARY * self.dim if layer == 0 else 0
        return block + embedding + ((VOCABULARY + 1) * self.dim if self.has_head(layer) else 0)

    @property
    def layer_weights(self) -> tuple[float, ...]:
        """What each layer costs, 1 in the mean, by its products with weights; () = all the same, the head aside."""
        if not self.ends_apart:
            return ()
        of_block = float(self._products)
        each = [_EMBEDDING * of_block, *[of_block] * (self.n_layers - 2), float(VOCABULARY * self.dim)]
        return tuple(round(self.n_layers * one / sum(each), 3) for one in each)

    @property
    def layer_sums(self) -> LayerSums:
        """How many sums each layer has in a tensor-parallel group; () = as blocks."""
        if not self.ends_apart:
            return ()
        return ((1, 0), *[(2, 2)] * (self.n_layers - 2), (0, 1))

    @property
    def _products(self) -> int:
        """Of a block: the elements of its matrices."""
        return 4 * self.dim * self.heads * (self.dim // self.heads) + 3 * self.dim * self.ffn
