"""Which execution of an iteration a record is about: a job that was restarted from a checkpoint executes some again.

All records are kept, numbered as attempts in the order of the source; the last attempt counts.
"""

from __future__ import annotations

from collections.abc import Sequence


class Attempts:
    """Counts the executions of each iteration (of a rank), as a source reports one after the other."""

    def __init__(self) -> None:
        self._last: dict[tuple[int | None, int], int] = {}
        self._ended: set[tuple[int | None, int]] = set()

    def begin(self, iteration: int, rank: int | None = None) -> None:
        """The source says that an execution begins."""
        if (rank, iteration) in self._last:
            self._last[rank, iteration] += 1
        self._last.setdefault((rank, iteration), 0)
        self._ended.discard((rank, iteration))

    def end(self, iteration: int, rank: int | None = None) -> int:
        """The number of the execution that a record of its time is about, which has ended with that."""
        if (rank, iteration) in self._ended or (rank, iteration) not in self._last:
            self.begin(iteration, rank)
        self._ended.add((rank, iteration))
        return self._last[rank, iteration]

    def of(self, iteration: int, rank: int | None = None) -> int:
        """The number of the execution that is going on, or was last."""
        return self._last.get((rank, iteration), 0)

    @property
    def earlier(self) -> int:
        """How many executions do not count, as a later one was reported."""
        return sum(self._last.values())

    def notes(self) -> tuple[str, ...]:
        """What a person should know of it, in a sentence; nothing when every iteration was executed once."""
        return note_of([iteration for (_, iteration), last in self._last.items() if last], self.earlier)


def note_of(again: list[int], earlier: int) -> tuple[str, ...]:
    """The sentence on iterations that were reported `again`, with so many records of `earlier` attempts."""
    if not again:
        return ()
    first, last, count = min(again), max(again), len(set(again))
    which = f"iteration {first} is" if count == 1 else f"{count} iterations from {first} to {last} are"
    kept = "the one before is" if earlier == 1 else f"the {earlier} before are"
    return (
        f"{which} reported more than once, as by a job that was restarted: the last report counts, {kept} kept as attempts",
    )


def gone_back(iterations: Sequence[int]) -> list[tuple[int, int]]:
    """(to, from): where a source goes back to an iteration that it has not reported, as a job does that is restarted between
    two of its lines. A table in no order at all shows none.

    >>> gone_back([10, 20, 30, 40, 25, 35, 45])
    [(25, 40)]
    """
    found, seen, last = list[tuple[int, int]](), set[int](), -1
    for one in iterations:
        found += [(one, last)] if one < last and one not in seen else []
        seen.add(one)
        last = one
    return found if len(found) <= len(iterations) // 4 else []


def notes_of_gone_back(found: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """A sentence each."""
    return tuple(
        f"it goes back from iteration {since} to {to}, which it had not reported: a job that was restarted between two of its "
        "lines, and what it reported of these iterations before counts as well"
        for to, since in sorted(set(found))
    )
