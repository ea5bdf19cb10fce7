"""One iteration's micro-batches: a pure function of (corpus, seed, iteration), the same on every rank, whatever the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unskew.analytics.core.packing import pack
from unskew.runtime.corpus import Corpus
from unskew.runtime.options import RunOptions

Documents = Sequence[int]
"""Of one micro-batch: their numbers in the corpus."""


def drawn(corpus: Corpus, options: RunOptions, number: int) -> Sequence[Documents]:
    """The micro-batches of the `number`-th batch of the run."""
    return pack(
        corpus.lengths, seed=options.seed, iteration=number, micro_batches=options.micro_batches, max_tokens=options.tokens
    )


class Batch:
    """`lengths[m]` are the document lengths (tokens) of micro-batch m; targets are the next bytes within each document.

    `documents`: those of each micro-batch, where they are not the iteration's own; `counted`: the micro-batches whose gradients
    are summed, None = all.
    """

    def __init__(
        self,
        corpus: Corpus,
        options: RunOptions,
        iteration: int,
        documents: Sequence[Documents] | None = None,
        counted: Collection[int] | None = None,
    ) -> None:
        self.iteration = iteration
        self._corpus = corpus
        self._documents = drawn(corpus, options, iteration) if documents is None else documents
        self._counted = range(len(self._documents)) if counted is None else counted
        self.lengths = [tuple(corpus.lengths[document] for document in documents) for documents in self._documents]

    def tokens(self, micro_batch: int) -> int:
        return sum(self.lengths[micro_batch])

    @cached_property
    def target_tokens(self) -> int:
        """The gradient's divisor: all target tokens of the iteration that count."""
        return sum(map(self.tokens, self._counted))

    def inputs(self, micro_batch: int, device: torch.device) -> Tensor:
        """Byte values [tokens]."""
        return self._bytes(micro_batch, slice(None, -1), device)

    def targets(self, micro_batch: int, device: torch.device) -> Tensor:
        """Byte values [tokens], one behind `inputs`."""
        return self._bytes(micro_batch, slice(1, None), device)

    def _bytes(self, micro_batch: int, part: slice, device: torch.device) -> Tensor:
        documents = [self._corpus.document(document)[part] for document in self._documents[micro_batch]]
        return torch.from_numpy(np.concatenate(documents).astype(np.int64)).to(device)
