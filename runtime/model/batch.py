"""One iteration's micro-batches: a pure function of (data, seed, iteration), the same on every rank, whatever the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unskew.analytics.core.packing import pack
from unskew.runtime.corpus import Corpus
from unskew.runtime.data import Data, Documents
from unskew.runtime.options import RunOptions


def drawn(data: Data, options: RunOptions, number: int) -> Sequence[Documents]:
    """The micro-batches of the `number`-th batch of the run."""
    if not isinstance(data, Corpus):
        return data.drawn(number)
    return pack(
        data.lengths, seed=options.seed, iteration=number, micro_batches=options.micro_batches, max_tokens=options.tokens
    )


class Batch:
    """`lengths[m]` are the document lengths (tokens) of micro-batch m; targets are the next ids within each document.

    `documents`: those of each micro-batch, where they are not the iteration's own; `counted`: the micro-batches whose gradients
    are summed, None = all.
    """

    def __init__(
        self,
        data: Data,
        options: RunOptions,
        iteration: int,
        documents: Sequence[Documents] | None = None,
        counted: Collection[int] | None = None,
    ) -> None:
        self.iteration = iteration
        self._data = data
        self._documents = drawn(data, options, iteration) if documents is None else documents
        self._counted = range(len(self._documents)) if counted is None else counted
        self.lengths = [tuple(data.length(document) for document in documents) for documents in self._documents]

    def tokens(self, micro_batch: int) -> int:
        return sum(self.lengths[micro_batch])

    @cached_property
    def target_tokens(self) -> int:
        """The gradient's divisor: all target tokens of the iteration that count."""
        return sum(map(self.tokens, self._counted))

    def inputs(self, micro_batch: int, device: torch.device) -> Tensor:
        """Ids, of the corpus bytes [tokens]."""
        return self._part(micro_batch, slice(None, -1), device)

    def targets(self, micro_batch: int, device: torch.device) -> Tensor:
        """Ids [tokens], one behind `inputs`."""
        return self._part(micro_batch, slice(1, None), device)

    def _part(self, micro_batch: int, part: slice, device: torch.device) -> Tensor:
        documents = [self._data.document(document)[part] for document in self._documents[micro_batch]]
        return torch.from_numpy(np.concatenate(documents).astype(np.int64)).to(device)
