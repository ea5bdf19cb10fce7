"""Which rank of a watched job died first, where several have ended: the others are its victims, and are never named for it.

Known is what its kernel showed (in which order processes that were watched ended, with which status) and what each rank has
written as its last line. A launcher knows less: torchrun dates failures in whole seconds, and a status says nothing of order.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unskew.collector.events import RankDetached

STOPPED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOST_ANOTHER = (
    "closed by peer", "reset by peer", "peer closed", "broken pipe", "connection was likely closed", "connection refused",
    "timed out waiting", "application timeout", "timed out after", "timed out in", "remote process exit", "nccl error",
)  # fmt: skip
"""What torch and its backends say where another rank is gone: the exception is then no fault of the rank that has it."""
INTERRUPTED = "KeyboardInterrupt"
KILLED_WITHIN_S = 10.0
"""A launcher that is interrupted twice kills who does not leave at once."""
GOES_ON_S = 60.0
"""A job that steps so long after it was asked to stop has been asked for something else, and one that stands still hangs."""
OF_TORCH = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


class Exit(NamedTuple):
    """`at_s`: when a process that was watched ended, None = it was over when it was first looked at. `status`: its exit
    code, or the signal that ended it below 0; None = it was reaped before it could be read."""

    rank: int
    at_s: float | None
    status: int | None

    @property
    def asked(self) -> bool:
        """Whether somebody stopped it: a launcher ends the others so when one has died."""
        return self._signal in STOPPED_BY

    @property
    def struck(self) -> bool:
        """Whether a signal ended it that no other rank's end brings about; SIGABRT is how a backend gives up its own."""
        return self._signal is not None and self._signal not in {*STOPPED_BY, signal.SIGABRT}

    @property
    def detail(self) -> str:
        if self.status is None:
            return "its process ended"
        if self._signal is not None:
            return f"signal {signal.Signals(self._signal).name}"
        return f"exit code {self.status}"

    @property
    def _signal(self) -> int | None:
        return -self.status if self.status is not None and self.status < 0 else None


def died(exits: Sequence[Exit], stated: Mapping[int, RankDetached]) -> list[Exit]:
    """Who ended before its time and was not asked to; `stated`: what ranks wrote at their ends, those of other machines too."""
    elsewhere = [Exit(rank, None, None) for rank in stated.keys() - {one.rank for one in exits}]
    ended = (one for one in (*exits, *elsewhere) if not one.asked and one.status != 0)
    return [one for one in ended if one.rank not in stated or stated[one.rank].error]


def interrupted(exits: Sequence[Exit], stated: Mapping[int, RankDetached]) -> bool:
    """Whether somebody stopped the job by Ctrl-C: no launcher ends the others so when one has died. A job in which a rank was
    struck before the first that was interrupted had died before."""
    words = {rank for rank, one in stated.items() if one.error.startswith(INTERRUPTED)}
    by_ctrl_c = [one for one in exits if one.status == -signal.SIGINT or one.rank in words]
    first_s = min((one.at_s for one in by_ctrl_c if one.at_s is not None), default=0.0)
    return bool(by_ctrl_c or words) and not any(one.struck for one in died_before(exits, first_s))


def died_before(exits: Sequence[Exit], asked_s: float) -> list[Exit]:
    """Those that ended before somebody asked the job to stop, and not because of it."""
    return [one for one in exits if one.at_s is not None and one.at_s < asked_s - KILLED_WITHIN_S]


def is_stopping(now_s: float, asked_s: float | None, stepped_s: float) -> bool:
    """Whether a job that was asked to stop (None = it was not), and stepped last at `stepped_s`, is about to end."""
    return asked_s is not None and max(stepped_s - asked_s, now_s - max(asked_s, stepped_s)) < GOES_ON_S


def were_stopped(exits: Sequence[Exit], stated: Mapping[int, RankDetached], ranks: int) -> bool:
    """Whether the job of so many `ranks` ended because somebody asked it to, as far as its ends tell."""
    return interrupted(exits, stated) or (len(exits) == ranks and all(one.asked for one in exits))


def first_dead(
    exits: Sequence[Exit], stated: Mapping[int, RankDetached], ranks: int, attached: int, *, failed: bool
) -> Exit | None:
    """Who died first, of a job of so many `ranks`, of which `attached` are known; None = nobody did, or it cannot be known
    (yet). `failed`: the command has ended, with an error: nothing more will be known.

    Nobody did of a job that was interrupted. Who says that another one is gone is none. Of the rest the first one where all
    of them were seen to end. Else who was struck by a signal, or ended by an exception of its own; or the only one of which
    nothing is known, where all others say that another one is gone. Whose exit code alone tells that it did not end well
    (`sys.exit(3)`) counts where the others say so, or were stopped.
    """
    known, victims = attached == ranks, _victims(stated)
    if (not known and not failed) or interrupted(exits, stated):
        return None
    quiet = [one for one in exits if one.status and not one.asked and one.rank in stated and not stated[one.rank].error]
    stopped = sum(one.asked for one in exits)
    ended = [*died(exits, stated), *(quiet if victims or len(quiet) + stopped == ranks > len(quiet) else ())]
    rest = [one for one in ended if one.rank not in victims]
    likely: list[Exit]
    if known and all(one.at_s is not None for one in rest):
        by_time = sorted(rest, key=lambda one: one.at_s or 0.0)
        silent = [one for one in by_time if one.rank not in stated and one.status is not None]
        likely = (silent if by_time and by_time[0].rank in stated else by_time)[:1] or by_time[:1]
    else:
        own = [one for one in rest if known and one.rank in stated]
        likely = [one for one in rest if one.struck] or own or (rest if len(victims) == ranks - 1 else [])
    if len(likely) != 1 or (likely[0].status is None and not failed):  # reaped before it could be read: it may have ended well
        return None
    return likely[0]


def left_early(exits: Sequence[Exit], stated: Mapping[int, RankDetached], ranks: int) -> int | None:
    """The rank that ended as if all was done, where all others then say that one is gone: of a loader with fewer batches."""
    victims = _victims(stated)
    failed = {one.rank for one in exits if one.status}
    left = [rank for rank in stated.keys() - victims - failed if not stated[rank].error]
    return left[0] if len(left) == 1 and len(victims) == ranks - 1 > 0 else None


def _victims(stated: Mapping[int, RankDetached]) -> set[int]:
    return {rank for rank, one in stated.items() if lost_another(one.error)}


def lost_another(error: str) -> bool:
    """Whether an exception of torch says that another rank is gone."""
    return any(of in error for of in OF_TORCH) and any(words in error.lower() for words in LOST_ANOTHER)
