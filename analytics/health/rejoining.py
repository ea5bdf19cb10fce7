"""When a process is started for a rank beside the run: in mode auto for a lost one, at an ever lower rate, else when asked.

A process that ended is gone for good. The next one takes over its rank's number, holds nothing, and is on standby until a plan
has work for it (docs/internals/standby.md).
"""

from __future__ import annotations

import msgspec

from unskew.collector.command import Command, wrong_name
from unskew.collector.events import CommandRefused, Control, DeviceJoined, DeviceLost, ProcessEnded, RankAdded

FIRST_WAIT = 10
"""Iterations that mode auto lets pass after a rank's second loss; after each further one it waits twice as long."""
LEAST_LEFT = 10
"""In the last iterations of a run nothing is started any more: it could hardly get work."""


class Rejoining(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's control events tell of its processes. `processes`: rank -> how many it has had, the coming one included;
    `losses`: rank -> the iteration of each of its losses; `gone`: lost and not there again; `coming`: added and not there yet.
    `cut_off`: lost while the process is still there, so the device is not given to another one. One that goes on has not cost
    the rank a process: that loss does not count.
    """

    processes: dict[int, int] = {}
    losses: dict[int, tuple[int, ...]] = {}
    gone: frozenset[int] = frozenset()
    coming: dict[int, RankAdded] = {}
    cut_off: frozenset[int] = frozenset()

    def take(self, event: Control) -> Rejoining:
        """With one more event of the run in the log."""
        if not isinstance(event, RankAdded | DeviceJoined | DeviceLost | ProcessEnded):
            return self
        rank, coming = event.rank, {rank: added for rank, added in self.coming.items() if rank != event.rank}
        match event:
            case RankAdded():
                processes = {**self.processes, rank: event.process}
                return msgspec.structs.replace(self, processes=processes, coming={**coming, rank: event})
            case DeviceJoined():
                processes, losses = {rank: 1, **self.processes}, self.losses
                if rank in self.cut_off:
                    losses = {**losses, rank: losses[rank][:-1]}
                return msgspec.structs.replace(
                    self,
                    processes=processes,
                    losses=losses,
                    gone=self.gone - {rank},
                    coming=coming,
                    cut_off=self.cut_off - {rank},
                )
            case ProcessEnded():
                return msgspec.structs.replace(self, cut_off=self.cut_off - {rank})
            case DeviceLost():
                losses = {**self.losses, rank: (*self.losses.get(rank, ()), event.iteration or 0)}
                cut_off = self.cut_off | {rank} if event.cut_off else self.cut_off
                return msgspec.structs.replace(self, losses=losses, gone=self.gone | {rank}, coming=coming, cut_off=cut_off)

    def due(self, committed: int, most: int) -> list[RankAdded]:
        """What mode auto starts when so many iterations are judged: each rank `most` times at most, with pauses that double."""
        return [
            self._added(rank, "auto", f"it was lost in iteration {losses[-1]}, time {len(losses)} of at most {most}", committed)
            for rank, losses in sorted(self.losses.items())
            if losses
            and rank in self.gone - self.cut_off
            and rank not in self.coming
            and len(losses) <= most
            and committed > losses[-1] + (FIRST_WAIT << (len(losses) - 2) if len(losses) > 1 else 0)
        ]

    def given_up(self, rank: int, most: int) -> str:
        """Why mode auto does not start a rank again that has just been lost; "" when it will."""
        times = len(self.losses.get(rank, ()))
        if not 0 < most < times:
            return ""
        return f"rank {rank} was lost {times} times: mode auto starts a rank {most} times at most, `unskew rank add` once more"

    def command(self, command: Command, committed: int, *, iterations: int, most_ranks: int) -> RankAdded | CommandRefused:
        """What somebody asks for: the rank of the command, else the lowest lost one, else a new one. `most_ranks`: for so many
        there is a place."""
        waiting = sorted(self.gone - self.coming.keys() - self.cut_off)
        new = max(self.processes, default=-1) + 1
        asked = command.target or str(waiting[0] if waiting else new)
        refusal = wrong_name(command.by)
        if not refusal and committed >= iterations:
            refusal = "the run is at its end"
        if not refusal:
            refusal = self._refusal(asked, new, most_ranks)
        if refusal:
            by = command.user if wrong_name(command.by) else command.by
            refused = f"rank {command.target}".strip()
            return CommandRefused(command=refused, by=by, reason=refusal, user=command.user, command_id=command.id)
        added = self._added(int(asked), command.by, command.reason, committed)
        return msgspec.structs.replace(added, user=command.user, command_id=command.id)

    def _refusal(self, asked: str, new: int, most_ranks: int) -> str:
        """Why a rank cannot be started; "" when it can."""
        if not (asked.isascii() and asked.isdecimal()):
            return f"rank {asked} is no rank, allowed: a whole number"
        rank = int(asked)
        if rank in self.coming:
            return f"rank {rank} is being started already"
        if rank in self.cut_off:
            return f"rank {rank} was cut off, its process has its device"
        if rank < new:
            return "" if rank in self.gone else f"rank {rank} lives"
        if rank >= most_ranks:
            return f"rank {rank} has no place: the node has places for {most_ranks} ranks"
        return "" if rank == new else f"rank {rank} leaves numbers out, the next new rank is {new}"

    def _added(self, rank: int, by: str, reason: str, committed: int) -> RankAdded:
        return RankAdded(rank=rank, process=self.processes.get(rank, 0) + 1, by=by, reason=reason, watermark=committed)
