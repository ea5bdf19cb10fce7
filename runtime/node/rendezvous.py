"""Where ranks find each other: what each has published, and who waits for what.

It lives in the agent, so it outlasts the controller, and only what the agent's socket lets in can read or write it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from unskew.runtime.protocol import Published

Rank = TypeVar("Rank", bound=Hashable)


class RendezvousTable(Generic[Rank]):
    """Values by key; `Rank` is how an answer finds its way. A rank waits for one set of keys at a time."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._asked: dict[Rank, tuple[Sequence[str], set[str]]] = {}

    def publish(self, key: str, value: bytes) -> list[tuple[Rank, Published]]:
        """Note a value; whom it completes the answer for."""
        self._values[key] = value
        for _, missing in self._asked.values():
            missing.discard(key)
        return self._answers([rank for rank, (_, missing) in self._asked.items() if not missing])

    def ask(self, rank: Rank, keys: Sequence[str]) -> list[tuple[Rank, Published]]:
        """The values of `keys` for `rank`, if all are there; else once they are, unless it asks for others before."""
        self._asked[rank] = keys, {key for key in keys if key not in self._values}
        return self._answers([rank] if not self._asked[rank][1] else [])

    def forget(self, rank: Rank) -> None:
        """The rank is gone."""
        self._asked.pop(rank, None)

    def clear(self) -> None:
        """A new plan: whoever built groups of an older one has built them, or is called off."""
        self._values.clear()
        self._asked.clear()

    def _answers(self, ranks: Iterable[Rank]) -> list[tuple[Rank, Published]]:
        answers = []
        for rank in ranks:
            keys, _ = self._asked.pop(rank)
            answers.append((rank, Published(keys=tuple(keys), values=tuple(self._values[key] for key in keys))))
        return answers
