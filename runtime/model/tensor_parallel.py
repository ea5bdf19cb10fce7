"""What the members of a tensor-parallel group compute together (Megatron-LM, Shoeybi et al. 2019, section 3).

Hidden states and norms are the same on every member. A linear layer that is cut by columns takes them as they are (`entered`:
the gradients that come back are summed), one cut by rows gives a part of a sum (`summed`). Embedding and output head are cut by
tokens of the vocabulary, and so is the loss: nobody has all logits. Each sum is one collective, which every member begins in
the same order, because all execute the same actions.

In a sequence-parallel group (Korthikanti et al. 2022, section 4.2.2) each member has its tokens of hidden states and norms
alone: a linear layer that is cut by columns gathers them all, and once more in the backward pass instead of keeping them
(`by_columns` in model.py); `summed` gives each the sums of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import functional


class Shard(Protocol):
    """One member's place in its group; `sequence_parallel`: it has its tokens of what is not cut, instead of all."""

    sequence_parallel: bool = False

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all members' tensors, in place. Raises `PeerLost`."""

    def gather(self, tensor: Tensor) -> Tensor:
        """All members' tensors: [member, ...]. Raises `PeerLost`."""

    def sum_tokens(self, tensor: Tensor) -> Tensor:
        """Of the sum of all members' tensors [token, ...] this member's tokens. Raises `PeerLost`."""

    def gather_tokens(self, own: Tensor, tokens: int) -> Tensor:
        """All of so many tokens, of which each member has its own. Raises `PeerLost`."""


class TokensPart(msgspec.Struct, eq=False):
    """This member has its part of so many `tokens`."""

    shard: Shard
    tokens: int

    def all_of(self, own: Tensor) -> Tensor:
        return self.shard.gather_tokens(own, self.tokens)


def entered(x: Tensor, shard: Shard | None) -> Tensor:
    """`x`, whose gradient is the sum of what the members' parts give."""
    if shard is None:
        return x
    y: Tensor = _Entry.apply(x, shard)  # type: ignore[no-untyped-call]
    return y


def summed(part: Tensor, shard: Shard | None) -> Tensor:
    """The sum of the members' parts; in a sequence-parallel group of this member's tokens."""
    if shard is None:
        return part
    of = _PartialSum if not shard.sequence_parallel else _TokensSum
    y: Tensor = of.apply(part, shard)  # type: ignore[no-untyped-call]
    return y


def looked_up(tokens: Tensor, embedding: Tensor, vocabulary: range, shard: Shard) -> Tensor:
    """The embeddings of `tokens`, of which this member has those of its part of the vocabulary."""
    absent = (tokens < vocabulary.start) | (tokens >= vocabulary.stop)
    found = functional.embedding((tokens - vocabulary.start).masked_fill(absent, 0), embedding)
    return summed(found.masked_fill(absent[..., None], 0.0), shard)


def cross_entropy(logits: Tensor, targets: Tensor, vocabulary: range, shard: Shard | None) -> Tensor:
    """The sum of the targets' losses, from logits of this member's part of the vocabulary."""
    if shard is None:
        return functional.cross_entropy(logits, targets, reduction="sum")
    loss: Tensor = _CrossEntropy.apply(logits, targets, vocabulary, shard)  # type: ignore[no-untyped-call]
    return loss


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sum(dy.contiguous()), None


class _PartialSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: Shard) -> Tensor:
        ctx.mark_dirty(part)
        return shard.sum(part)

    @staticmethod
    def backward(_: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _TokensSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: Shard) -> Tensor:
        ctx.shard, ctx.tokens = shard, len(part)
        return shard.sum_tokens(part)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.gather_tokens(dy, ctx.tokens), None


class _CrossEntropy(torch.autograd.Function):
    """log(sum of exp) of each part, and the target's logit from who has it, in one message."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: range, shard: Shard) -> Tensor:
        own = torch.nonzero((targets >= vocabulary.start) & (targets < vocabulary.stop)).squeeze(1)
        place = targets[own] - vocabulary.start
        target = logits.new_zeros(len(targets)).index_put_((own,), logits[own, place])
        parts = shard.gather(torch.stack((logits.logsumexp(1), target)))
        log_sum = parts[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, log_sum, own, place)
        return (log_sum - parts[:, 1].sum(0)).sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sum, own, place = ctx.saved_tensors
        gradient = (logits - log_sum[:, None]).exp_()
        gradient[own, place] -= 1.0
        return gradient.mul_(dy), None, None, None
