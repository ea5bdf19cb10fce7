"""How each weight is cut among the members of a tensor-parallel group, and the view of a piece of it.

A weight is ``[outer, units, inner]`` in storage order, cut along its units: heads, feed-forward columns or tokens of the
vocabulary. Sums of gradients, moves and checkpoints take pieces of tensors so, whatever a rank has of the layer.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from unskew.analytics.shards.parts import Part, Piece, ends_of, unit


class Cut(msgspec.Struct, frozen=True):
    """A weight of so many `units`, `outer` times; 0 units = it is not cut: every member has all of it."""

    outer: int = 1
    units: int = 0

    def view(self, tensor: Tensor, held: Part | None, piece: Piece | None) -> Tensor:
        """The piece of a tensor of which `held` is there, None = all of that; empty where there is nothing of it."""
        if piece is None:
            return tensor
        if self.units == 0:
            return tensor if piece.uncut else tensor[:0]
        if piece.low == piece.high:
            return tensor.view(-1)[:0]
        begin, end = (unit(fraction, self.units) for fraction in ends_of(held))
        first, last = unit(piece.low, self.units), unit(piece.high, self.units)
        inner = tensor.numel() // max(self.outer * (end - begin), 1)
        return tensor.view(self.outer, end - begin, inner).narrow(1, first - begin, last - first)


UNCUT = Cut()
