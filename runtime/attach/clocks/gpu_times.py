"""From a loop's moments, as the host had them, to when its GPU came to them. Nothing here knows a GPU."""

from __future__ import annotations

from bisect import bisect_right

import msgspec

from unskew.collector.files.loop_parts import LoopPart, Moment


class GpuTimes:
    """When the GPU came to the moments of this iteration and the last. `begun_ns`: when the host began, before which the GPU
    came to none."""

    def __init__(self, begun_ns: int) -> None:
        self._moments_ns, self._gpu_ns, self._waited_ns = [begun_ns], [begun_ns], [0]
        self._exact_ns = begun_ns
        self._waits: dict[int, int] = {}

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Between two moments, neither of them placed yet, the loop waited for others."""
        self._waits[until_ns] = since_ns

    def place(self, moment_ns: int, later_ns: int, seen_ns: int) -> None:
        """The GPU came to a moment `later_ns` after it came to the one before (which may be of another stream, and then earlier
        than that); it had when the host looked at `seen_ns`.

        The two clocks drift apart by some millionths: a GPU comes to no moment before the host does, nor after the host has
        seen it.
        """
        self._exact_ns = min(max(self._exact_ns + later_ns, moment_ns), seen_ns)
        gpu_ns = max(self._exact_ns, self._gpu_ns[-1])
        self._moments_ns.append(moment_ns)
        self._gpu_ns.append(gpu_ns)
        waited_ns = self._waited_ns[-1]
        if (since_ns := self._waits.pop(moment_ns, None)) is not None:
            waited_ns += gpu_ns - self._gpu_ns[self._index(since_ns)]
        self._waited_ns.append(waited_ns)

    def of(self, part: LoopPart) -> LoopPart:
        """A part whose moments are placed; one that is not (no event belongs into a CUDA graph) counts as the one before. For
        how long a thread had no core is nothing to a GPU."""
        begun = self._at(part.begun)
        placed = msgspec.structs.replace(
            part,
            begun=begun,
            ended=self._at(part.ended),
            pieces=[(kind, self._at(since), self._at(until), number) for kind, since, until, number in part.pieces],
            readings=[(*begun, 0)],
            commit=None if part.commit is None else (self._at((part.commit[0], 0))[0], *part.commit[1:]),
        )
        if part.commit is not None:
            self._forget(part.commit[0])
        return placed

    def _at(self, moment: Moment) -> Moment:
        index = self._index(moment[0])
        return self._gpu_ns[index], self._waited_ns[index]

    def _index(self, moment_ns: int) -> int:
        """Of the last that is no later."""
        return max(bisect_right(self._moments_ns, moment_ns) - 1, 0)

    def _forget(self, before_ns: int) -> None:
        """What no later part asks for."""
        first = self._index(before_ns)
        del self._moments_ns[:first], self._gpu_ns[:first], self._waited_ns[:first]
        for until_ns in [until_ns for until_ns in self._waits if until_ns < self._moments_ns[0]]:
            del self._waits[until_ns]
