"""The commit protocol: when an iteration counts, also when ranks die around that moment.

After its gradients are reduced, a rank enters a barrier, which means "I hold all gradients" and carries its vote. Whoever
passes the barrier knows that every member holds the reduced gradients of the iteration. After an abort the survivors
tell each other their standing, in the rendezvous where they meet:

* if anyone passed the barrier of iteration i, everyone who has not stepped i yet steps it now, from the gradients it still
  holds;
* else iteration i goes on as the next attempt, with what is kept of its gradients (scheduler/kept.py).

Ranks can differ by one iteration at most: nobody passes barrier i + 1 before all have entered it, hence stepped i. A plan takes
effect when the vote's minimum of "highest plan version held" reaches it. (ReCoVer and FT-HSDP commit per step in the same
spirit.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from unskew.analytics.core.plan import Role
from unskew.analytics.shards.parts import Part
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.rank.comm import Comm


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank brings to the barrier. `loss` is its share (nats per target token); `clock_us` its clock, for a logical
    one."""

    loss: float
    highest_plan_version: int
    log_complete: bool
    clock_us: int


class CommitOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the barrier of one iteration, the same on every rank that passed it."""

    iteration: int
    plan_version: int
    attempt: int
    loss: float
    next_plan_version: int
    log_complete: bool
    clock_us: int


def vote(comm: Comm, iteration: int, attempt: int, mine: Vote) -> CommitOutcome:
    """The barrier. Raises `PeerLost`; then nothing is known, and `settle` must find out."""
    row = torch.tensor([mine.loss, mine.highest_plan_version, mine.log_complete, mine.clock_us], dtype=torch.float64)
    rows = comm.all_gather(row)
    return CommitOutcome(
        iteration=iteration,
        plan_version=comm.plan_version,
        attempt=attempt,
        loss=float(rows[:, 0].sum()),
        next_plan_version=int(rows[:, 1].min()),
        log_complete=bool(rows[:, 2].min()),
        clock_us=int(rows[:, 3].max()),
    )


class CommitStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank has come when its communication broke.

    `stepped` iterations are done; `attempt` is the highest attempt at iteration `stepped` it knows of (-1 = none); `outcome` is
    the last barrier it passed: of iteration `stepped` when it has not stepped yet, else of the one before, or None.
    """

    stepped: int
    attempt: int
    outcome: CommitOutcome | None

    @property
    def passed(self) -> int:
        """Iterations whose barrier this rank has passed."""
        return self.stepped if self.outcome is None else max(self.stepped, self.outcome.iteration + 1)


class AgreedCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What the survivors agree on: `committed` iterations count; `outcome` is that of the last one (None before the first);
    the next attempt of iteration `committed` is numbered `attempt`."""

    committed: int
    outcome: CommitOutcome | None
    attempt: int


class HeldCopy(msgspec.Struct, frozen=True):
    """A copy of a layer, or of a `part` of it, stepped so often; `summed`: which micro-batches its gradient is the sum of, each
    with the plan version under which it was computed."""

    part: Part | None
    steps: int
    summed: Mapping[int, int]


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself where it meets the others of a plan; `copies` of each layer, the present one first."""

    standing: CommitStanding
    copies: Mapping[int, Sequence[HeldCopy]]

    def parts(self, committed: int) -> dict[int, list[Part | None]]:
        """Layer -> the parts of which there are current copies."""
        parts = {layer: [copy.part for copy in of if copy.steps == committed] for layer, of in self.copies.items()}
        return {layer: of for layer, of in parts.items() if of}

    def sums(self, role: Role, committed: int) -> dict[int, Mapping[int, int]]:
        """Layer -> what the gradient is the sum of in the copy that `role` goes on with."""
        found = {}
        for layer in role.layers:
            of = (copy for copy in self.copies.get(layer, ()) if copy.steps == committed and copy.part == role.part)
            if (copy := next(of, None)) is not None:
                found[layer] = copy.summed
        return found


def encoded(standing: CommitStanding, copies: Mapping[int, Sequence[HeldLayer]]) -> bytes:
    """What a rank says, for the rendezvous."""
    held = {layer: [HeldCopy(copy.part, copy.steps, copy.summed) for copy in of] for layer, of in copies.items()}
    return _encoder.encode(RankState(standing=standing, copies=held))


def decoded(heard: Mapping[int, bytes]) -> dict[int, RankState]:
    """Rank -> what it says of itself."""
    return {rank: _decoder.decode(stated) for rank, stated in heard.items()}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankState)


def decide(standings: Sequence[CommitStanding]) -> AgreedCommit:
    """The rule itself: pure, the same on every survivor.

    >>> half = CommitOutcome(
    ...     iteration=4, plan_version=0, attempt=0, loss=2.0, next_plan_version=0, log_complete=True, clock_us=0
    ... )
    >>> two = [CommitStanding(stepped=4, attempt=0, outcome=outcome) for outcome in (half, None)]
    >>> decide(two).committed
    5
    """
    committed = max(standing.passed for standing in standings)
    outcomes = [s.outcome for s in standings if s.outcome is not None and s.outcome.iteration == committed - 1]
    begun = [standing.attempt for standing in standings if standing.stepped == committed]
    return AgreedCommit(committed=committed, outcome=outcomes[0] if outcomes else None, attempt=max(begun, default=-1) + 1)
