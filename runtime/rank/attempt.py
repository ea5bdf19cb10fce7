"""One attempt at an iteration on one rank: its chunks, and the sums of its gradients, begun while the backward pass goes on.

The log has every chunk before a bucket that it is in is begun: once it is in a sum it counts, also when its rank dies in the
next moment. So nothing is begun in the middle of a chunk; those that end a rank's backward pass are in parts for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch

from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.gradient_sync import Bucket, buckets_of, last_steps
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.scheduler.kept import KeptGradients, spread
from unskew.runtime.links import Links
from unskew.runtime.model.batch import Batch
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.options import RunOptions
from unskew.runtime.rank.comm import Comm, PeerLost
from unskew.runtime.rank.device import Device
from unskew.runtime.rank.executor import ExecutedWork, Executor
from unskew.runtime.rank.gradients import GradientSums, Reducer
from unskew.runtime.rank.injection import Injector
from unskew.runtime.rank.progress import RankProgress
from unskew.runtime.rank.recorder import Recorder


class AttemptMeans:
    """What a rank makes its attempts with; `layer_bytes`: the gradients of each layer."""

    def __init__(
        self,
        options: RunOptions,
        rank: int,
        *,
        device: Device,
        progress: RankProgress,
        recorder: Recorder,
        injector: Injector,
        layer_bytes: Sequence[int],
    ) -> None:
        self.options, self.rank, self.device, self.progress = options, rank, device, progress
        self.recorder, self.injector, self.layer_bytes = recorder, injector, layer_bytes
        self.links = Links(options, rank, device)
        self.dtype: torch.dtype = getattr(torch, options.stored)

    def of(self, plan: Plan, kept: KeptGradients, layers: Mapping[int, HeldLayer]) -> RankAttempt:
        """The next one, by a plan and with what is kept of the one before."""
        buckets = buckets_of(plan, self.layer_bytes, self.options.bucket_bytes, kept.reduced)
        return RankAttempt(self, plan, kept, layers, buckets)


class RankAttempt(msgspec.Struct, frozen=True):
    """An attempt by `plan`, which leaves gradients and losses in the `layers`."""

    means: AttemptMeans
    plan: Plan
    kept: KeptGradients
    layers: Mapping[int, HeldLayer]
    buckets: Sequence[Bucket]

    def execute(self, batch: Batch, comm: Comm, *, overlapped: bool = False) -> GradientSums:
        """The chunks that are not kept; `overlapped`: with sums begun that could be. Raises `PeerLost`."""
        means, plan = self.means, spread(self.plan, self.kept)
        actions = [action for action in build_schedule(plan).by_rank[means.rank] if self.kept.executes(action)]
        kinds = [action.kind for action in actions]
        steps = last_steps(actions, plan, self.buckets, means.rank) if overlapped else {}
        adds_to = [layer for of in steps.values() for step in of for layer in step.closes]
        executed = ExecutedWork()  # of its own: ranks collect no circles
        sums = self.sums(comm, before=lambda: self._log(executed), open_layers=adds_to)
        executor = Executor(
            plan=plan, actions=actions, kept=self.kept, layers=self.layers, batch=batch, comm=comm, device=means.device,
            progress=means.progress, label=means.recorder.span, dtype=means.dtype, shapes=means.options.given_on,
            computes=getattr(torch, means.options.dtype),
            before=lambda index: means.injector.before_action(batch.iteration, index, kinds), links=means.links,
            executed=executed, steps=steps, closed=sums.close,
        )  # fmt: skip
        means.recorder.batch(self.plan, self.kept, batch.lengths)
        if not actions:  # a death among the chunks happens also where there are none
            means.injector.before_action(batch.iteration, 0, ["none"])
        try:
            executor.run()
        except PeerLost:
            comm.stop()  # who waits for this rank goes free before it ends what it can end alone
            executor.finish_weights()
            sums.keep()
            raise
        finally:
            means.recorder.gpu()
            self._chunks(executed)
        return sums

    def sums(
        self, comm: Reducer, *, before: Callable[[], None] = lambda: None, open_layers: Iterable[int] = ()
    ) -> GradientSums:
        """The sums of its gradients, none of them begun."""
        means = self.means
        return GradientSums(
            self.plan, self.layers, self.kept, comm, self.buckets, device=means.device, progress=means.progress,
            label=means.recorder.span, before=before, open_layers=open_layers,
            before_last=lambda: means.injector.at(means.progress.iteration, "in_sync"),
        )  # fmt: skip

    def reduce(self, sums: GradientSums, comm: Comm) -> None:
        """Leave the summed gradients in the layers, and the sums in the log. Raises `PeerLost`."""
        try:
            sums.finish()
            if self.buckets and self.means.options.prices_sums:
                sums.take_time(comm, self.means.links.sum_us)
        except PeerLost:
            comm.stop()
            sums.keep()
            raise
        self.means.recorder.add(*sums.spans())

    def _chunks(self, executed: ExecutedWork) -> None:
        self.means.recorder.chunks(executed, self.plan.team_of.get(self.means.rank, ()))

    def _log(self, executed: ExecutedWork) -> None:
        """What was executed, with the kernel."""
        self._chunks(executed)
        self.means.recorder.hand_over()
