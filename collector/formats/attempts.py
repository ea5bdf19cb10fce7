"""Which execution of an iteration a record is about: a job that was restarted from a checkpoint executes some again.

All records are kept, numbered as attempts in the order of the source; the last attempt counts.
"""

from __future__ import annotations


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
