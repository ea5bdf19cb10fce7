"""What happens to a cluster, and what a policy hears of it."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["failed", "slowed", "recovered", "joined", "link_slowed", "link_recovered", "maintenance", "review"]


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that begins at `at_s` (seconds since the start of the job).

    * failed: `devices` are dead until they have `joined` again;
    * slowed: `devices` run at `speed` until they have `recovered`;
    * link_slowed: messages of `link` = (replica, stage) take `delay_s` longer until link_recovered;
    * maintenance: `devices` are taken away after notice: nothing is lost, they join later;
    * review: nothing happens; a policy asked to be called at this time.
    """

    kind: Kind
    at_s: float
    devices: tuple[int, ...] = ()
    speed: float | None = None
    link: tuple[int, int] | None = None
    delay_s: float | None = None
    why: str = ""
