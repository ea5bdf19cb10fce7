"""What the ranks of a training that is not ours report besides: where they are, what their loop lets be divided."""

from __future__ import annotations

from typing import Literal

import msgspec

from unskew.collector.events.base import Telemetry


class PipelinePlace(msgspec.Struct, frozen=True, array_like=True):
    """The stage of a rank, of how many in its pipeline, and the ranks of this one."""

    stage: int
    stages: int
    members: tuple[int, ...]


class RankAttached(Telemetry, frozen=True, kw_only=True, tag="rank_attached@1"):
    """A process of a training that is not ours begins to be measured, as rank `rank` of `ranks`.

    `groups`: the members of its process groups that are smaller than the job, `dimensions`: of each the name that its
    `DeviceMesh` has for it, "" = it is of none; `pipeline`: its place in one (None = there is none); `off`: what cannot be
    measured, a sentence each; `gpu`: the GPU by whose clock its spans are timed ("" = by the host's).
    """

    rank: int
    ranks: int
    node: str
    pid: int
    on_gpu: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    off: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = ()
    pipeline: PipelinePlace | None = None
    gpu: str = ""


class RankDetached(Telemetry, frozen=True, kw_only=True, tag="rank_detached@1"):
    """The process of a `RankAttached` ends, by itself; `error`: the exception that ends it, "" = none. Or its measuring ends,
    and it trains on: `unmeasured` is the reason."""

    rank: int
    pid: int
    error: str = ""
    unmeasured: str = ""


class LoaderDivided(Telemetry, frozen=True, kw_only=True, tag="loader_divided@1"):
    """A rank of a training that is not ours iterates over `session.balance(loader)`: what can be divided there, and how.

    `samples`: rank -> how many of a global batch it is given by the loader; `window`: over how many batches lengths may be
    balanced; `lengths`: whether they are known; `loss`: the mean over the rank's own samples, divided by all ranks', or not
    known; `by_tokens`: the mean is over tokens; `leaves`: the rank could leave the living job.
    """

    rank: int
    samples: tuple[int, ...]
    window: int
    lengths: bool
    loss: Literal["mean", "global", "unknown"]
    by_tokens: bool = False
    leaves: bool = False


class SamplesDrawn(Telemetry, frozen=True, kw_only=True, tag="samples_drawn@1", gc=False):
    """The lengths of the samples of the global batches that all ranks train from iteration `iteration` on, each in the loader's
    order; the lowest rank writes it. `coming`: those of the batches behind these, where they are known; () = nothing new."""

    iteration: int
    batches: tuple[tuple[int, ...], ...]
    coming: tuple[tuple[int, ...], ...] = ()


class HostClock(Telemetry, frozen=True, kw_only=True, tag="host_clock@1"):
    """How far a node's wall clock is ahead of the controller's (negative: behind), from the handshake; true to `within_us`.

    `at_us` of this node's writers minus `offset_us` is the controller's time.
    """

    node: str
    offset_us: int
    within_us: int
