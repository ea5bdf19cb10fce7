"""The slow device handed to whoever can replace it: a command, or an address, that its user has given to `unskew watch`."""

from __future__ import annotations

import msgspec

from unskew.analytics.actuators.actuator import Situation, weighed
from unskew.analytics.scheduler.propose import Proposal


class Replace:
    """What the command does is the user's: a launcher's restart, a drained node."""

    name = "replace"

    def propose(self, now: Situation) -> tuple[Proposal | None, str]:
        if not now.hand_to:
            return None, "nobody was named who could replace it"
        if len(now.slow) != 1:
            return None, "it is for one slow rank"
        (slow,) = now.slow
        if slow in now.handed:
            return None, f"rank {slow} was handed on already"
        after_us = now.times.healthy(slow).steps_us(now.division, now.batches)
        verdict = msgspec.to_builtins(now.slow[slow])
        change = f"rank {slow} is handed to {now.hand_to}"
        return weighed(now, now.plan, after_us, by=self.name, change=change, verdict=verdict)
