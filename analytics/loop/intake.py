"""Log entries in any order of arrival -> whole committed iterations, in order.

The watermark is `IterationCommitted`: before it is written every rank has handed its chunks of the iteration to the kernel.
Entries of different writers are read one after the other, so an iteration is released one poll after its first watermark was
seen: by then every writer has been read past it. What may still be missing is waited for, up to a second: chunks, where the
vote showed that some rank was late (``log_complete`` false), and the other ranks' watermarks, whose times count. If chunks
do not come the iteration is released as incomplete, and nobody is judged by it; an iteration without any watermark is
passed over. An iteration that keeps gradients of an earlier attempt has its chunks in several: it is released as incomplete at
once, for nothing predicts how long a part of it takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable

import msgspec

from unskew.analytics.core.iteration import (
    BesideChunks,
    BucketStep,
    Chunk,
    CommittedIteration,
    GroupWait,
    IterationTelemetry,
    Transfer,
)
from unskew.analytics.core.plan import Plan, chunk_kinds
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.shards.crossings import shares
from unskew.analytics.shards.together import steps_of_sum
from unskew.collector.events import (
    CHUNK_KINDS,
    PAUSES,
    Event,
    GpuState,
    GradientsKept,
    IterationCommitted,
    MicroBatchPacked,
    Span,
)

_PATIENCE_POLLS = 20
ROUNDED_US = 2
"""Moments of two spans that differ by so little may be one."""
_OF_ITERATIONS = (Span, MicroBatchPacked, IterationCommitted, GpuState, GradientsKept)
BESIDE_CHUNKS = frozenset({"optimizer", "data_wait", "other", *PAUSES})


class _Open(msgspec.Struct):
    spans: list[Span]
    packed: dict[int, tuple[int, ...]]
    marks: list[IterationCommitted]
    gpus: list[GpuState]
    kept_in: set[int]
    marked_at_poll: int = 0

    @property
    def mark(self) -> IterationCommitted:
        """What was committed: the last attempt, where one that died had stepped an earlier one that nobody else knew of."""
        return max(self.marks, key=lambda mark: (mark.plan_version, mark.attempt, mark.rank))

    def counted(self) -> list[Span]:
        """The spans of the attempt that was committed, in an order that does not depend on who was read first."""
        mark = self.mark
        counted = [span for span in self.spans if span.plan_version == mark.plan_version and span.attempt == mark.attempt]
        return sorted(counted, key=lambda span: span.rank)

    def is_complete(self, plan: Plan) -> bool:
        """Whether every chunk and every micro-batch of the plan has arrived."""
        layers = sum(len(hop.ranks) * hop.n_layers for route in plan.routes for hop in route.hops)
        # A chunk may be in parts; one of a whole model that is not ours has no layers.
        found = sum(1 if one.n_layers is None else one.n_layers for one in self.counted() if one.kind in CHUNK_KINDS)
        return found >= len(chunk_kinds(plan.schedule)) * layers and len(self.packed) == len(plan.routes) and not self.in_parts

    @property
    def in_parts(self) -> bool:
        """Whether chunks of earlier attempts count."""
        return self.mark.plan_version in self.kept_in

    def is_whole(self, plan: Plan, marks_suffice: bool) -> bool:
        """Whether nothing more is to come; a rank that died before its step leaves no watermark."""
        marked = sum(mark.plan_version == plan.plan_version for mark in self.marks) == len(plan.ranks)
        return marked and (marks_suffice or self.in_parts or self.is_complete(plan))


class Intake:
    """Feed it every poll of the tail, also an empty one. A run begins with iteration `first`.

    `marks_suffice`: a rank writes its watermark behind all else of the iteration, so with everybody's watermark nothing more is
    to come, whatever the plan lets expect.
    """

    def __init__(self, first: int = 0, *, marks_suffice: bool = False) -> None:
        self._marks_suffice = marks_suffice
        self._open: dict[int, _Open] = {}
        self._next = first
        self._polls = 0

    def take(self, events: Iterable[Event | None], plan_of: dict[int, Plan]) -> list[IterationTelemetry]:
        """The iterations that this poll completes; `plan_of[plan version]` shows which chunks included the output head."""
        self._polls += 1
        for event in events:
            if not isinstance(event, _OF_ITERATIONS) or event.iteration is None:
                continue
            if event.iteration >= self._next:
                of = self._open.setdefault(event.iteration, _Open([], {}, [], [], set()))
                if isinstance(event, Span):
                    of.spans.append(event)
                elif isinstance(event, GpuState):
                    of.gpus.append(event)
                elif isinstance(event, GradientsKept):
                    of.kept_in.add(event.plan_version)
                elif isinstance(event, MicroBatchPacked):
                    of.packed[event.micro_batch] = event.lengths
                else:
                    of.marked_at_poll = of.marked_at_poll or self._polls
                    of.marks.append(event)
        self._skip_gap()
        released = []
        while (opened := self._open.get(self._next)) and opened.marks and opened.mark.plan_version in plan_of:
            plan, waited = plan_of[opened.mark.plan_version], self._polls - opened.marked_at_poll
            if waited < 1 or (waited < _PATIENCE_POLLS and not opened.is_whole(plan, self._marks_suffice)):
                break
            released.append(_release(opened, plan))
            del self._open[self._next]
            self._next += 1
        return released

    def _skip_gap(self) -> None:
        """Go on behind iterations that are in no rank's log (every disk was full) when a later one has waited long enough."""
        later = [number for number, opened in self._open.items() if opened.marks and number > self._next]
        if not later or (self._next in self._open and self._open[self._next].marks):
            return
        following = min(later)
        if self._polls - self._open[following].marked_at_poll >= _PATIENCE_POLLS:
            for number in range(self._next, following):
                self._open.pop(number, None)
            self._next = following


def _release(opened: _Open, plan: Plan) -> IterationTelemetry:
    mark = opened.mark
    counted = opened.counted()
    works = {micro_batch: work_of(lengths) for micro_batch, lengths in opened.packed.items()}
    chunks = [span for span in counted if span.kind in CHUNK_KINDS]
    buckets, coreless_us = _buckets(counted), _coreless_us(counted, sure=True)
    maybe_us = _coreless_us(counted, sure=False) - coreless_us
    return IterationTelemetry(
        committed=CommittedIteration(
            iteration=mark.iteration,
            plan_version=mark.plan_version,
            chunks=tuple(_chunk(span, works, plan) for span in chunks if span.micro_batch in works),
            works=tuple(works.get(number, Work(0, 0)) for number in range(len(plan.routes))),
            measured_us=float(max(seen.wall_us for seen in opened.marks if seen.plan_version == mark.plan_version)),
            log_complete=opened.is_complete(plan),
            transfers=_transfers(counted, works, plan),
        ),
        collectives_us=_collectives_us((group, us) for group, us, _ in buckets),
        exchanged_us=_exchanged_us(counted),
        bucket_steps=tuple(_bucket_step(*bucket) for bucket in buckets),
        group_waits=_group_waits(chunks, works, plan),
        # Ranks that execute nothing measure themselves beside the iterations; what they find comes by a control event.
        probes=tuple(span for span in counted if span.kind == "probe" and span.rank in plan.executors),
        gpus=tuple(sorted(opened.gpus, key=lambda state: state.rank)),
        beside=tuple(BesideChunks(span.rank, span.kind, _own_us(span)) for span in counted if span.kind in BESIDE_CHUNKS),
        without_core=_without_core(chunks),
        coreless_us=coreless_us,
        maybe_coreless_us=maybe_us,
        late_us=_late_us(counted) if maybe_us else 0.0,
        idle=_idle(chunks, opened.marks),
        own_us={mark.rank: own for mark in opened.marks if (own := _chunks_own_us(mark))},
    )


def _chunk(span: Span, works: dict[int, Work], plan: Plan) -> Chunk:
    first, n_layers = span.first_layer or 0, span.n_layers or 0
    return Chunk(
        rank=span.rank,
        kind=span.kind,
        n_layers=plan.work_of(first, n_layers),
        has_head=first + n_layers == plan.n_layers,
        work=works[span.micro_batch or 0],
        us=_own_us(span) / plan.weight_of.get(span.rank, 1.0),
        tp=len(plan.members_at(span.micro_batch or 0, first)) if span.rank in plan.team_of else 1,
        again=plan.recomputes(span.rank, span.kind),
    )


def _own_us(span: Span) -> float:
    return float(span.compute_us if span.compute_us is not None else span.wall_us)


def _without_core(chunks: list[Span]) -> dict[int, float]:
    coreless, wall = Counter[int](), Counter[int]()
    for span in chunks:
        coreless[span.rank] += span.runq_us or 0
        wall[span.rank] += span.wall_us
    return {rank: coreless[rank] / max(of_rank, 1) for rank, of_rank in wall.items()}


def _idle(chunks: list[Span], marks: list[IterationCommitted]) -> dict[int, float]:
    own = Counter[int]()
    for span in chunks:
        own[span.rank] += round(_own_us(span))
    worked = {mark.rank: mark.cpu_us for mark in marks if mark.cpu_us is not None and own[mark.rank]}
    return {rank: min(max(1.0 - us / own[rank], 0.0), 1.0) for rank, us in worked.items()}


def _chunks_own_us(mark: IterationCommitted) -> dict[str, float]:
    own = {"F": mark.forward_own_us, "B": mark.backward_own_us}
    return {kind: float(us) for kind, us in own.items() if us is not None}


def _coreless_us(spans: list[Span], *, sure: bool) -> float:
    """What the busiest rank took with the time that it had no core, over what the busiest took without: a rank that had none
    while it would have waited for the others cost nothing. `sure`: only with what made its spans longer; an emulated device
    goes on while its process has no core."""
    own, coreless = Counter[int](), Counter[int]()
    for span in spans:
        if span.kind in CHUNK_KINDS or span.kind in BESIDE_CHUNKS:
            own[span.rank] += round(_own_us(span))
        if span.kind != "probe":
            coreless[span.rank] += _longer_us(span) if sure else span.runq_us or 0
    return float(max((own + coreless).values(), default=0) - max(own.values(), default=0))


def _longer_us(span: Span) -> int:
    """By how much the time that it had no core made a span longer."""
    ready_us = span.runq_us or 0
    if span.compute_us is None:
        return ready_us
    return min(ready_us, max(span.wall_us - span.compute_us - (span.wait_tp_us or 0), 0))


def _late_us(spans: list[Span]) -> float:
    """For how long the rank that was late most began chunks later than it could, for nothing was under way on it and nothing
    came in; as far as it had had no core in chunks which did not become longer for it."""
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    late = [0.0]
    for own in by_rank.values():
        ends, left, of_rank = sorted(one.start_us + one.wall_us for one in own), 0, 0
        for span in sorted((one for one in own if one.kind in CHUNK_KINDS), key=_start_us):
            before = bisect_right(ends, span.start_us + ROUNDED_US)
            us = max(min(span.start_us - ends[before - 1], left), 0) if before else 0
            of_rank += us
            left += (span.runq_us or 0) - _longer_us(span) - us
        late.append(float(of_rank))
    return max(late)


def _group_waits(chunks: list[Span], works: dict[int, Work], plan: Plan) -> tuple[GroupWait, ...]:
    """Of each chunk that a tensor-parallel group executed together; those with the loss have one exchange of another size."""
    waits: dict[tuple[str, int, int], list[Span]] = {}
    for span in chunks if plan.teams else ():
        if span.wait_tp_us is not None and span.micro_batch in works:
            waits.setdefault((span.kind, span.micro_batch, span.first_layer or 0), []).append(span)
    found = []
    for (kind, micro_batch, first), of in waits.items():
        members, n_layers = len(plan.members_at(micro_batch, first)), of[0].n_layers or 0
        again, last = plan.recomputes(of[0].rank, kind), first + n_layers == plan.n_layers
        if members == len(of) and not ((kind == "F" or again) and last):
            found.append(
                GroupWait(
                    us=min(span.wait_tp_us or 0 for span in of), kind=kind, first_layer=first, n_layers=n_layers,
                    members=members, tokens=works[micro_batch].tokens, again=again,
                    sequence_parallel=plan.token_parts(of[0].rank) > 1,
                )
            )  # fmt: skip
    return tuple(found)


def _transfers(spans: list[Span], works: dict[int, Work], plan: Plan) -> tuple[Transfer, ...]:
    """Messages, timed from the moment both sides were ready: the receiver waited, and the sender had posted.

    A micro-batch's path is a chain, so of its messages from one rank to another (several, where it passes ranks more than once)
    the n-th sent is the n-th taken; where the log lacks one of them, none is timed. A link is free once the message before has
    been taken.
    """
    sent: dict[tuple[int | None, ...], list[Span]] = {}
    taken: dict[tuple[int | None, ...], list[Span]] = {}
    for span in spans:
        if span.kind == "send":
            sent.setdefault((span.rank, span.peer, span.micro_batch), []).append(span)
        elif span.kind == "recv":
            taken.setdefault((span.peer, span.rank, span.micro_batch), []).append(span)
    pairs = [
        pair
        for channel, receives in taken.items()
        if len(sends := sent.get(channel, [])) == len(receives)
        for pair in zip(sorted(sends, key=_start_us), sorted(receives, key=_start_us), strict=True)
    ]
    times, free_us = [], dict[tuple[int, int], int]()
    for send, receive in sorted(pairs, key=lambda pair: pair[0].start_us):
        link, end_us = (send.rank, receive.rank), receive.start_us + receive.wall_us
        if receive.wall_us > 0:
            us = float(max(end_us - max(send.start_us, receive.start_us), 0))
            whole = max(receive.start_us, free_us.get(link, 0)) <= send.start_us
            work = works.get(send.micro_batch if send.micro_batch is not None else -1)
            givers, takers = (plan.team_of.get(rank, (rank,)) for rank in link)
            share = shares(givers, takers).get(link, 1.0)
            times.append(Transfer(*link, us, work.tokens * share if work is not None else 0, whole))
        free_us[link] = max(end_us, free_us.get(link, 0))
    return tuple(times)


def _start_us(span: Span) -> int:
    return span.start_us


def _collectives_us(steps: Iterable[tuple[str, float]]) -> tuple[float, ...]:
    """Times of gradient collectives, each bucket's from the moment its last member had come, together per group."""
    times: Counter[str] = Counter()
    for group, us in steps:
        times[group] += round(us)
    return tuple(map(float, times.values()))


def _exchanged_us(spans: list[Span]) -> float:
    """What the rank that waited least for its data-parallel peers in its chunks and beside them waited, as FSDP's ranks do."""
    waited = Counter[int]()
    for span in spans:
        if span.kind in CHUNK_KINDS or span.kind in BESIDE_CHUNKS:
            waited[span.rank] += span.wait_dp_us or 0
    return float(min(waited.values(), default=0))


def _buckets(spans: list[Span]) -> list[tuple[str, float, float]]:
    """(group, us from the moment its last member had come, bytes) of each bucket that all members of its group have logged;
    they are in its name."""
    members: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.kind == "all_reduce" and span.group:
            members.setdefault((span.group, span.first_layer or 0), []).append(span)
    return [
        (group, max(max(s.start_us + s.wall_us for s in of) - max(s.start_us for s in of), 0), of[0].bytes or 0)
        for (group, _), of in sorted(members.items())
        if len(of) == group.count("-") + 1
    ]


def _bucket_step(group: str, us: float, n_bytes: float) -> BucketStep:
    members = group.count("-") + 1
    return BucketStep(us / steps_of_sum(members), n_bytes / members)
