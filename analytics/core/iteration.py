"""One committed iteration as the analytics see it: its chunks, its messages, its work, and what was measured beside it."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.workload import Work
from unskew.collector.events import GpuState, Span


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One executed chunk: kind F, B or W, how many average layers it costs, whether with the output head, its work, its own
    time (us); `tp` ranks executed it together, of which this is one; `again`: with the forward once more."""

    rank: int
    kind: str
    n_layers: float
    has_head: bool
    work: Work
    us: float
    tp: int = 1
    again: bool = False


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """One message: `us` from the moment both sides had posted to its end; `tokens`: of its micro-batch, in proportion where
    tensor-parallel groups divide a message; `whole`: its receiver
    waited when it was sent, and its link was free, so that nothing of its time is missing and nothing else is in it."""

    sender: int
    receiver: int
    us: float
    tokens: float = 0
    whole: bool = True


class GroupWait(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One chunk of a tensor-parallel group: how long the member that waited least waited for it, and what they exchange by."""

    us: float
    kind: str
    first_layer: int
    n_layers: int
    members: int
    tokens: int
    again: bool = False
    sequence_parallel: bool = False


class BucketStep(msgspec.Struct, frozen=True, gc=False):
    """One step of the sum of a bucket of gradients, in the mean: how long, and for how many bytes."""

    us: float
    n_bytes: float


class CommittedIteration(msgspec.Struct, frozen=True, kw_only=True):
    """One whole committed iteration: the chunks of the attempt that counted, the micro-batches' work, its time (us), and its
    messages with the waiting for either side removed."""

    iteration: int
    plan_version: int
    chunks: tuple[Chunk, ...]
    works: tuple[Work, ...]
    measured_us: float
    log_complete: bool
    transfers: tuple[Transfer, ...] = ()


class BesideChunks(msgspec.Struct, frozen=True, gc=False):
    """Work of a rank that is no chunk: its kind of span, its own time (us)."""

    rank: int
    kind: str
    us: float


class IterationTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """A whole committed iteration, the times of its gradient collectives, steps of these, what tensor-parallel groups waited,
    what was probed before it, and what GPUs reported about themselves in it, by rank. `beside`: what ranks did beside chunks;
    `without_core`: rank -> the part of its chunks' time (0 to 1) in which it was ready and had no core; `coreless_us`: by how
    much such times, in all that ranks did, made the iteration longer, `maybe_coreless_us`: by how much more at most, where they
    passed while an emulated device went on, `late_us`: for how long the rank that was late most began chunks late, as far as it
    had had no core; `idle`: rank -> the part of its chunks' own time in which it wanted none, `own_us`: rank -> kind of work ->
    what its chunks took by themselves, beside their layers, where that was measured. `exchanged_us`: what the rank that waited
    least for the others amid its own work waited: all took as long, so that is what they exchanged and no one's slowness."""

    committed: CommittedIteration
    probes: tuple[Span, ...] = ()
    collectives_us: tuple[float, ...] = ()
    exchanged_us: float = 0.0
    group_waits: tuple[GroupWait, ...] = ()
    bucket_steps: tuple[BucketStep, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    beside: tuple[BesideChunks, ...] = ()
    without_core: dict[int, float] = {}
    coreless_us: float = 0.0
    maybe_coreless_us: float = 0.0
    late_us: float = 0.0
    idle: dict[int, float] = {}
    own_us: dict[int, dict[str, float]] = {}
