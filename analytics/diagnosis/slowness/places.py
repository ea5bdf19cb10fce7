"""Who may be slow, and when: the candidates of the fit (fit.py), and what it found."""

from __future__ import annotations

import msgspec


class Rows(msgspec.Struct, frozen=True):
    """`kind` and `stage` [row], both as numbers from 0."""

    kind: tuple[int, ...]
    stage: tuple[int, ...]


class SlowPlace(msgspec.Struct, frozen=True):
    """Who may be slow: ranks of these stages in these replicas."""

    stages: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def is_rank(self) -> bool:
        return len(self.stages) == len(self.replicas) == 1

    @property
    def is_replica(self) -> bool:
        return len(self.stages) > 1


class SlowStretch(msgspec.Struct, frozen=True):
    """`who` is slow in the iterations [begin, end), positions. `levels`: kind of work (a number) -> log of the time ratio.
    `gain`: by how much twice the log-likelihood is better with it; from `limit` on it is no noise."""

    who: SlowPlace
    begin: int
    end: int
    levels: tuple[float, ...] = ()
    gain: float = 0.0
    limit: float = 0.0


class Slowness(msgspec.Struct, frozen=True):
    """`named`: ranks that nothing else explains; `ambiguous`: for each of the others the sets of ranks that explain it as well.
    `sigma`: noise of one rank, kind of work and iteration. `smallest`: log of the slowness that would be named in any rank, of
    one there from the first iteration on, and of one that came later; None: none would."""

    named: tuple[SlowStretch, ...] = ()
    ambiguous: tuple[tuple[SlowPlace, SlowPlace], ...] = ()
    sigma: float = 0.0
    smallest: float | None = None
    smallest_change: float | None = None
