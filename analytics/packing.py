"""Documents -> micro-batches: a pure function of (lengths of the corpus, seed, iteration), never of the plan.

First fit over a random order: documents are drawn without replacement; each goes to the first micro-batch with room, a new
micro-batch is opened when none has any, and once all are open a document that fits nowhere is left for another iteration.
Packing stops when `_MISSES` drawn documents in a row fitted nowhere. Drawing is a lazy Fisher-Yates shuffle, so that the cost
grows with the batch and neither with the corpus nor with the iteration's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

_MISSES = 32


class PackingError(ValueError):
    """The corpus cannot fill the micro-batches; the message is one sentence."""


def pack(
    document_lengths: Sequence[int], *, seed: int, iteration: int, micro_batches: int, max_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Document indices of each micro-batch of an iteration: each document at most once, none empty, at most `max_tokens` each.

    `document_lengths` are tokens, each from 1 to `max_tokens`; `seed` and `iteration` are not negative. The same arguments give
    the same result in every process. Raises `PackingError` for a document that is too long and for a corpus too small.
    """
    packed: list[list[int]] = []
    room: list[int] = []
    misses = 0
    for document in _drawn(len(document_lengths), np.random.Generator(np.random.PCG64((seed, iteration)))):
        length = int(document_lengths[document])
        if not 1 <= length <= max_tokens:
            raise PackingError(f"document {document} has {length} tokens, allowed are 1 to {max_tokens}")
        place = next((number for number, free in enumerate(room) if length <= free), None)
        if place is not None:
            packed[place].append(document)
            room[place] -= length
            misses = 0
        elif len(packed) < micro_batches:
            packed.append([document])
            room.append(max_tokens - length)
        else:
            misses += 1
        if len(packed) == micro_batches and (misses == _MISSES or not any(room)):
            break
    if len(packed) < micro_batches:
        raise PackingError(
            f"the corpus is too small: its {len(document_lengths)} documents fill {len(packed)} micro-batches of {max_tokens} "
            f"tokens, {micro_batches} are needed"
        )
    return tuple(tuple(documents) for documents in packed)


def _drawn(count: int, generator: np.random.Generator) -> Iterator[int]:
    """0..count-1 in random order, each drawn when it is asked for."""
    moved: dict[int, int] = {}
    for position in range(count):
        chosen = int(generator.integers(position, count))
        yield moved.get(chosen, chosen)
        moved[chosen] = moved.pop(position, position)
