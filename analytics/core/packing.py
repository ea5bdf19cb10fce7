"""Documents -> micro-batches: a pure function of (lengths of the corpus, seed, iteration), never of the plan.

Next fit over a random order: documents are drawn without replacement; a micro-batch takes them as they come and is closed when
the next one does not fit, which then opens the next micro-batch. So no document is passed over for its length, and
micro-batches differ in their tokens as they do in a real stream. Drawing is a lazy Fisher-Yates shuffle: the cost grows with
the batch, and neither with the corpus nor with the iteration's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numpy.random import PCG64, Generator


class PackingError(ValueError):
    """The corpus cannot fill the micro-batches; the message is one sentence."""


def pack(
    document_lengths: Sequence[int], *, seed: int, iteration: int, micro_batches: int, max_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Document indices of each micro-batch of an iteration: each document at most once, none empty, at most `max_tokens` each.

    `document_lengths` are tokens, each from 1 to `max_tokens`; `seed` and `iteration` are not negative. The same arguments give
    the same result in every process. Raises `PackingError` for a document that is too long and for data too small.
    """
    packed: list[list[int]] = []
    room = 0
    for document in _drawn(len(document_lengths), Generator(PCG64((seed, iteration)))):
        length = int(document_lengths[document])
        if not 1 <= length <= max_tokens:
            raise PackingError(f"document {document} has {length} tokens, allowed are 1 to {max_tokens}")
        if length > room:
            if len(packed) == micro_batches:
                break
            packed.append([])
            room = max_tokens
        packed[-1].append(document)
        room -= length
    if len(packed) < micro_batches:
        raise PackingError(
            f"the data is too small: its {len(document_lengths)} documents fill {len(packed)} micro-batches of {max_tokens} "
            f"tokens, {micro_batches} are needed"
        )
    return tuple(tuple(documents) for documents in packed)


def _drawn(count: int, generator: Generator) -> Iterator[int]:
    """0..count-1 in random order, each drawn when it is asked for."""
    moved: dict[int, int] = {}
    for position in range(count):
        chosen = int(generator.integers(position, count))
        yield moved.get(chosen, chosen)
        moved[chosen] = moved.pop(position, position)
