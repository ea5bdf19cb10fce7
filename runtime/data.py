"""Data of somebody's own: documents of token ids, in a sequence or one after the other, or batches that are packed already.

The function that `--data` names gives one of three:

* a sequence of documents (it has a length and takes an index): drawn in the order of the run's seed, as a corpus is;
* an iterator of documents: packed as they come, next fit, into micro-batches of at most `--tokens`;
* an iterator of packed batches: each a list of micro-batches, each a list of documents.

A function that takes an argument is asked for the batch of each iteration by its number instead, documents or packed. What an
iteration trains is a function of its number alone: an iterator is read again from its beginning where an earlier batch is asked
for than it still has, so a run that is resumed, and a rank that comes back, see the data in the order in which it was. A
document of n ids has n - 1 tokens, each but the last with the next as its target; a longer one is cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.analytics.core.packing import pack
from unskew.runtime.corpus import Corpus, CorpusError, load_corpus
from unskew.runtime.options import RunOptions
from unskew.runtime.own import OwnError, asking, function_of
from unskew.runtime.size import VOCABULARY

Documents = Sequence[int]
"""Of one micro-batch: their numbers in the data."""
Ids = npt.NDArray[np.int64]
KEPT_BATCHES = 8
MOST_EMPTY = 100_000
"""Documents in a row that have no token: of an endless iterator of such no batch would ever come."""


class InOrder:
    """Batches in the order in which they come; the last of them are kept."""

    def __init__(self, options: RunOptions) -> None:
        assert options.data is not None
        self._function, self._options = function_of(options.data), options
        self._by_number = len(inspect.signature(self._function).parameters) > 0
        self._batches: dict[int, list[list[int]]] = {}
        self._documents: dict[int, Ids] = {}
        self._coming: Iterator[list[list[Ids]]] | None = None
        self._next = 0
        self._named = 0

    def drawn(self, number: int) -> Sequence[Documents]:
        """The micro-batches of the `number`-th batch. Raises `OwnError`."""
        if number not in self._batches:
            with asking(f"--data {self._options.data} failed"):
                self._ask_for(number)
        return self._batches[number]

    def _ask_for(self, number: int) -> None:
        if self._by_number:
            self._take(number, self._packed(self._called(number), f"batch {number}"))
            return
        if self._coming is None or number < self._next:
            self._coming, self._next = self._read(), 0
        while self._next <= number:
            batch = next(self._coming, None)
            if batch is None:
                raise OwnError(f"--data {self._options.data} ends after {self._next} batches")
            self._take(self._next, batch)
            self._next += 1

    def length(self, document: int) -> int:
        return len(self._documents[document]) - 1

    def document(self, document: int) -> Ids:
        """Its ids, `length` + 1 of them."""
        return self._documents[document]

    def _take(self, number: int, batch: list[list[Ids]]) -> None:
        numbered = []
        for micro_batch in batch:
            numbers = range(self._named, self._named + len(micro_batch))
            self._documents.update(zip(numbers, micro_batch, strict=True))
            numbered.append(list(numbers))
            self._named += len(micro_batch)
        self._batches[number] = numbered
        if len(self._batches) > KEPT_BATCHES:
            for document in chain.from_iterable(self._batches.pop(next(iter(self._batches)))):
                del self._documents[document]

    def _called(self, *number: int) -> Any:
        given = self._function(*number)
        if not isinstance(given, Iterable):
            shown = f"--data {self._options.data} gives {type(given).__name__}"
            raise OwnError(f"{shown}, allowed: documents or packed batches, in a sequence or one after the other")
        return given

    def _read(self) -> Iterator[list[list[Ids]]]:
        items = iter(self._called())
        first = next(items, None)
        items = chain([] if first is None else [first], items)
        if _depth(first) > 1:
            yield from (self._packed(item, f"batch {number}") for number, item in enumerate(items))
            return
        micro_batches, count = _next_fit(items, self._options), self._options.micro_batches
        while len(batch := list(islice(micro_batches, count))) == count:
            yield batch

    def _packed(self, batch: Any, what: str) -> list[list[Ids]]:
        options = self._options
        if _depth(batch) < 3:  # documents, packed here
            packed = list(_next_fit(batch, options))
        else:
            packed = [[_ids(document, options) for document in micro_batch] for micro_batch in batch]
        tokens = [sum(len(document) - 1 for document in micro_batch) for micro_batch in packed]
        if len(packed) != options.micro_batches or min(tokens) < 1 or max(tokens) > options.tokens:
            raise OwnError(
                f"--data {options.data}: {what} has {len(packed)} micro-batches of {min(tokens, default=0)} to "
                f"{max(tokens, default=0)} tokens, allowed: {options.micro_batches} of 1 to {options.tokens}"
            )
        return packed


class AnyOrder:
    """A sequence of documents, drawn by the run's seed."""

    def __init__(self, documents: Sequence[Any], options: RunOptions) -> None:
        self._documents, self._options = documents, options
        lengths = [len(document) for document in documents]
        most = options.tokens
        # A long document is as many pieces as it takes, each an entry (document, first id, length).
        self._pieces = [
            (number, first, min(most, length - 1 - first))
            for number, length in enumerate(lengths)
            for first in range(0, length - 1, most)
        ]
        if not self._pieces:
            raise OwnError(f"--data {options.data} has no document of two ids or more")
        self.lengths = [length for _, _, length in self._pieces]

    def drawn(self, number: int) -> Sequence[Documents]:
        options = self._options
        return pack(
            self.lengths, seed=options.seed, iteration=number, micro_batches=options.micro_batches, max_tokens=options.tokens
        )

    def length(self, document: int) -> int:
        return self.lengths[document]

    def document(self, document: int) -> Ids:
        number, first, length = self._pieces[document]
        with asking(f"--data {self._options.data} failed"):
            of = self._documents[number]
        return _ids(of, self._options)[first : first + length + 1]


Data = InOrder | AnyOrder | Corpus


def load_data(options: RunOptions) -> Data:
    """The run's data. Raises `CorpusError` where it cannot be used."""
    if options.data is None:
        return load_corpus(options.corpus, options.tokens)
    try:
        with asking(f"--data {options.data} failed"):
            function = function_of(options.data)
            if not inspect.signature(function).parameters:
                given = function()
                if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
                    return AnyOrder(given, options)
            return InOrder(options)
    except OwnError as error:
        raise CorpusError(str(error)) from error


def _ids(document: Any, options: RunOptions) -> Ids:
    """Raises `OwnError` for what is no document."""
    what = f"--data {options.data} gives {type(document).__name__} as a document"
    with asking(what):
        ids = np.asarray(document)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise OwnError(f"{what}: numbers of type {ids.dtype} in {ids.ndim} dimensions, allowed: ids, whole numbers in a row")
    least, most = int(ids.min(initial=0)), int(ids.max(initial=0))
    if least < 0 or (options.model is None and most >= VOCABULARY):
        allowed = "0 or more" if options.model is not None else f"bytes without --model, 0 to {VOCABULARY - 1}"
        raise OwnError(f"--data {options.data} has the id {least if least < 0 else most}, allowed: {allowed}")
    return ids.astype(np.int64, copy=False)


def _depth(item: Any) -> int:
    """How deep lists are nested: 1 for a document."""
    if isinstance(item, str) or not hasattr(item, "__len__") or getattr(item, "ndim", 1) == 0:
        return 0
    return 1 + (_depth(item[0]) if len(item) else 0)


def _next_fit(documents: Iterable[Any], options: RunOptions) -> Iterator[list[Ids]]:
    """Micro-batches of documents as they come, each closed when the next one does not fit; long ones are cut into pieces, of
    which each begins with the last id of the one before."""
    packed: list[Ids] = []
    room = most = options.tokens
    empty = 0
    for document in (_ids(one, options) for one in documents):
        empty = empty + 1 if len(document) < 2 else 0
        if empty == MOST_EMPTY:
            raise OwnError(
                f"--data {options.data} gives {empty:,} documents in a row of less than two ids, which have no token"
            )
        for first in range(0, len(document) - 1, most):
            piece = document[first : first + most + 1]
            if len(piece) - 1 > room:
                yield packed
                packed, room = [], most
            packed.append(piece)
            room -= len(piece) - 1
    if packed:
        yield packed
