"""What messages of this rank take: between emulated devices what the options say, and everywhere what faults add.

A message between emulated devices, or over a slow link, carries in front when it arrives, by the clock of its sender's device;
its receiver has it no sooner, and an emulated one no later either, however late its process wakes. The messages of a link, to
one peer, leave one after the other: each occupies it for its bytes over the bandwidth, and has arrived the latency after that.
Where sends are blocking, the sender's device does nothing else until then. The evaluator prices them by the same rules
(analytics/pipeline/dag.py).
"""

from __future__ import annotations

from typing import Protocol

from unskew.analytics.pipeline.gradient_sync import Bucket
from unskew.analytics.shards.together import steps_of_sum
from unskew.runtime.options import RunOptions


class Clock(Protocol):
    """Of the device whose messages they are."""

    emulated: bool

    def ended_us(self) -> int:
        """When its last chunk ended."""

    def wait_until(self, time_us: int) -> None:
        """Begin nothing before."""


class Links:
    """This rank's links; every rank knows all faults. Options that price links go with emulated devices alone."""

    def __init__(self, options: RunOptions, rank: int, device: Clock) -> None:
        self._rank, self._device = rank, device
        self._latency_us = options.link_us
        self._us_per_byte = 8 / options.link_mbps if options.link_mbps else 0.0
        self._blocking = options.sends == "blocking"
        self._faults = [fault for fault in options.faults if fault.kind == "slow_link"]
        self._slow = {(fault.rank, fault.peer) for fault in self._faults}
        self._free_us: dict[int, float] = {}

    def timed(self, sender: int, receiver: int) -> bool:
        """Whether messages over this link say when they arrive, in all iterations."""
        return self._device.emulated or (sender, receiver) in self._slow

    def together_us(self, steps: int, n_bytes: float) -> float:
        """What a collective among emulated devices takes in so many steps (shards/together.py) of so many bytes."""
        return steps * (self._latency_us + n_bytes * self._us_per_byte) if self._device.emulated else 0.0

    def sum_us(self, bucket: Bucket) -> float:
        """What the sum of a bucket of gradients takes among emulated devices; slow links are slow for messages alone."""
        members = len(bucket.ranks)
        return self.together_us(steps_of_sum(members), bucket.n_bytes / members)

    def sent(self, receiver: int, n_bytes: int, iteration: int) -> tuple[int, int]:
        """(when it is sent, when it arrives) of a message that is made now; its sender is blocked where sends are."""
        made_us = self._device.ended_us()
        left_us = max(made_us, self._free_us.get(receiver, 0)) + n_bytes * self._us_per_byte
        self._free_us[receiver] = left_us
        delay_us = sum(fault.delay_us(self._rank, receiver, iteration) for fault in self._faults)
        arrives_us = round(left_us + self._latency_us + delay_us)
        if self._blocking:
            self._device.wait_until(arrives_us)
        return made_us, arrives_us
