"""The devices and links of a simulated job: how they are, and what the policy estimates of them."""

from __future__ import annotations

from typing import Literal

import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.cluster.timing import Links, Speeds
from unskew.analytics.core.layout import Layout

FATAL = frozenset({"failed", "maintenance"})


class Hardware:
    """`truth`, `estimate` [device slot]: speeds, 0.0 = dead. `spares`: whole nodes. `slow_since`: slot -> second it turned
    slow.

    A slot that a spare serves keeps its number; when the broken or slow node is whole again, it is a spare itself.
    """

    def __init__(self, job: Job, spares: int) -> None:
        self.job, self.spares = job, spares
        self.truth: Speeds = np.ones(job.devices)
        self.estimate: Speeds = np.ones(job.devices)
        self.links: Links = {}
        self.slow_since: dict[int, float] = {}
        self._on_spares: set[int] = set()

    def strike(self, event: ClusterEvent) -> bool:
        """The truth changes; False when only the number of spares does."""
        devices = list(event.devices)
        if event.kind in FATAL:
            self.truth[devices] = 0.0
        elif event.kind == "slowed":
            self.truth[devices] = np.where(self.truth[devices] > 0, event.speed or 0.0, 0.0)
        elif event.kind in {"recovered", "joined"}:
            if self._on_spares.issuperset(devices) and (self.truth[devices] > 0).all():
                self.spares += len({self.job.node(device) for device in devices})
                self._on_spares -= set(devices)
                return False
            self.truth[devices] = np.where((self.truth[devices] > 0) | (event.kind == "joined"), 1.0, 0.0)
        elif event.link is not None:
            links = {link: delay for link, delay in self.links.items() if link != event.link}
            self.links = links | ({event.link: event.delay_s or 0.0} if event.kind == "link_slowed" else {})
        return True

    def update_estimate(self, event: ClusterEvent, measured: float) -> None:
        """What the policy takes from the event: a speed that was measured, not given; `measured` times the true one."""
        devices = list(event.devices)
        if event.kind in FATAL:
            self.estimate[devices] = 0.0
        elif event.kind == "slowed":
            self.estimate[devices] = np.clip(self.truth[devices] * measured, 0.02, 1.0) * (self.truth[devices] > 0)
            self.slow_since |= dict.fromkeys(devices, event.at_s)
        elif event.kind in {"recovered", "joined"}:
            self.estimate[devices] = self.truth[devices]
            for device in devices:
                self.slow_since.pop(device, None)

    def replace(self, devices: tuple[int, ...], nodes: int) -> None:
        """`nodes` spares serve these slots from now on."""
        slots = list(devices)
        self.spares -= nodes
        self.truth[slots] = self.estimate[slots] = 1.0
        self._on_spares |= set(slots)
        for slot in slots:
            self.slow_since.pop(slot, None)

    def missing(self, layout: Layout) -> Literal["nobody", "known", "unknown"]:
        """Is a device dead that the layout needs, and is it known to be?"""
        needed = layout.members
        gone = needed[self.truth[needed] == 0]
        if not len(gone):
            return "nobody"
        return "unknown" if (self.estimate[gone] > 0).any() else "known"
