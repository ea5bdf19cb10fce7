"""Turns what a rank did into spans."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from unskew.analytics.core.plan import Plan
from unskew.analytics.scheduler.kept import KeptGradients
from unskew.collector.events import ChunkKind, GradientsKept, MicroBatchPacked, Span, SpanKind, Telemetry
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.chunk_clock import OwnTimes
from unskew.runtime.nvml import gpu_state
from unskew.runtime.protocol import RankSpec
from unskew.runtime.rank.device import Device
from unskew.runtime.rank.executor import ExecutedWork

PATIENCE_S = 0.05
"""An iteration waits so long for the log: the helper thread that writes it may find every core taken for some 10 ms."""
SHORT_PATIENCE_S = 0.005
"""And so long when the one before waited in vain: a stalled disk costs the long wait once."""

GPU_EVERY = 4
"""Iterations. A verdict takes its evidence from what was reported since the slowness began, and needs four iterations
itself."""


class Recorder:
    """Spans of one rank on its device; `cpu_us`: for how long this attempt's chunks worked on a core; `own_us`: what they took
    beside their layers."""

    def __init__(self, spool: SpoolWriter, device: Device, rank_spec: RankSpec) -> None:
        self._spool, self._device, self._rank_spec = spool, device, rank_spec
        self._plan_version = self._iteration = self._attempt = 0
        self.on = True
        self._was_in_time = self._complete = True
        self.cpu_us: int | None = None
        self.own_us: OwnTimes = {}

    def begin(self, plan: Plan, iteration: int, attempt: int) -> None:
        """What follows belongs to this attempt."""
        self._plan_version, self._iteration, self._attempt = plan.plan_version, iteration, attempt
        turns = self._rank_spec.options.instrument_turns
        self.on = turns == 0 or iteration // turns % 2 == 0
        self._complete, self.cpu_us, self.own_us = True, None, {}

    def add(self, *events: Telemetry) -> None:
        """To the log, unless it is the turn of iterations without."""
        if self.on:
            for event in events:
                self._spool.append(event)

    def hand_over(self) -> bool:
        """Whether all that this attempt recorded is with the kernel, within what an iteration may wait for it; what one call
        found missing no later one finds."""
        if not self.on:
            return True
        self._was_in_time = self._spool.hand_over(PATIENCE_S if self._was_in_time else SHORT_PATIENCE_S)
        self._complete = self._complete and self._was_in_time
        return self._complete

    def span(self, *, kind: SpanKind, start_us: int, wall_us: int, **fields: Any) -> Span:
        """A span of the present attempt."""
        return Span(
            kind=kind,
            device=self._rank_spec.device_id,
            rank=self._rank_spec.rank,
            plan_version=self._plan_version,
            attempt=self._attempt,
            iteration=self._iteration,
            start_us=start_us,
            wall_us=wall_us,
            **fields,
        )

    def gpu(self) -> None:
        """Now and then what the GPU reports about itself."""
        where = self._device.torch_device
        if self.on and where.type == "cuda" and self._iteration % GPU_EVERY == 0:
            state = gpu_state(self._rank_spec.rank, where.index, self._iteration)
            self.add(*([state] if state else []))

    def chunks(self, executed: ExecutedWork, team: Sequence[int] = ()) -> None:
        """The chunks of an attempt since the last call, finished or cut short, with their messages, as the `team` executed
        them."""
        chunks, executed.chunks = executed.chunks, []
        sent, executed.sent = executed.sent, []
        self.own_us = executed.own_us
        if not self.on:
            return
        for done in chunks:
            timing, action = done.timing(), done.action
            if timing.cpu_us is not None:
                self.cpu_us = timing.cpu_us + (self.cpu_us or 0)
            self.add(
                self.span(
                    kind=action.kind,
                    start_us=timing.start_us,
                    wall_us=timing.wall_us,
                    micro_batch=action.micro_batch,
                    first_layer=action.first_layer,
                    n_layers=action.n_layers,
                    group="-".join(map(str, team)) or None,
                    compute_us=timing.compute_us,
                    wait_tp_us=timing.wait_tp_us,
                    # Where work is launched ahead, the host waits while the device still computes what came before.
                    wait_pp_us=done.wait_us if timing.idle_us is None else min(done.wait_us, timing.idle_us),
                    runq_us=timing.runq_us,
                )
            )
            self.add(*done.messages)
        self.add(*sent)

    def own(self, kind: ChunkKind) -> int | None:
        """What a chunk of this kind took beside its layers, in the median of those of this attempt; None = not measured."""
        of_kind = self.own_us.get(kind)
        return round(median(of_kind)) if of_kind else None

    def batch(self, plan: Plan, kept: KeptGradients, lengths: Sequence[tuple[int, ...]]) -> None:
        """The micro-batches that begin on this rank; and, from one rank, what the attempt has of earlier ones."""
        rank, attempt = self._rank_spec.rank, self._attempt
        for number, route in enumerate(plan.routes):
            if route.hops[0].rank == rank:
                packed = MicroBatchPacked(
                    iteration=self._iteration, micro_batch=number, attempt=attempt, lengths=lengths[number]
                )
                self.add(packed)
        for one in kept.stretches() if rank == plan.ranks[0] else ():
            self.add(
                GradientsKept(
                    iteration=self._iteration,
                    plan_version=self._plan_version,
                    attempt=attempt,
                    first_layer=one.first_layer,
                    n_layers=one.n_layers,
                    of_plan_version=one.plan_version,
                    micro_batches=one.micro_batches,
                )
            )

    def optimizer(self, start_us: int) -> None:
        self._device.drain()
        self.add(self.span(kind="optimizer", start_us=start_us, wall_us=self._device.now_us() - start_us))

    def regroup(self, plan: Plan, iteration: int, start_us: int) -> None:
        self.begin(plan, iteration, 0)
        self.add(self.span(kind="regroup", start_us=start_us, wall_us=self._device.now_us() - start_us))

    def migrate(self, plan: Plan, iteration: int, start_us: int, received: int) -> None:
        self.begin(plan, iteration, 0)
        wall_us = self._device.now_us() - start_us
        self.add(self.span(kind="migrate", start_us=start_us, wall_us=wall_us, bytes=received))
