"""One iteration's micro-batches: a pure function of (corpus, seed, iteration), the same on every rank, whatever the plan."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unskew.analytics.core.packing import pack
from unskew.runtime.corpus import Corpus
from unskew.runtime.options import RunOptions


class Batch:
    """`lengths[m]` are the document lengths (tokens) of micro-batch m; targets are the next bytes within each document."""

    def __init__(self, corpus: Corpus, options: RunOptions, iteration: int) -> None:
        self.iteration = iteration
        self._corpus = corpus
        self._documents = pack(
            corpus.lengths,
            seed=options.seed,
            iteration=iteration,
            micro_batches=options.micro_batches,
            max_tokens=options.tokens,
        )
        self.lengths = [tuple(corpus.lengths[document] for document in documents) for documents in self._documents]

    def tokens(self, micro_batch: int) -> int:
        return sum(self.lengths[micro_batch])

    @cached_property
    def target_tokens(self) -> int:
        """The gradient's divisor: all target tokens of the iteration."""
        return sum(map(sum, self.lengths))

    def inputs(self, micro_batch: int, device: torch.device) -> Tensor:
        """Byte values [tokens]."""
        return self._bytes(micro_batch, slice(None, -1), device)

    def targets(self, micro_batch: int, device: torch.device) -> Tensor:
        """Byte values [tokens], one behind `inputs`."""
        return self._bytes(micro_batch, slice(1, None), device)

    def _bytes(self, micro_batch: int, part: slice, device: torch.device) -> Tensor:
        documents = [self._corpus.document(document)[part] for document in self._documents[micro_batch]]
        return torch.from_numpy(np.concatenate(documents).astype(np.int64)).to(device)
