"""The compact form of what a watched loop did: a line per part of an iteration, which every reader takes for its events.

A rank that is not ours pays for each event that it builds and encodes; it writes moments instead, some 400 bytes an iteration:

    [120,1763738412000000,[0,"node:0","0-1",17,[5000,0],[9000,0],[["F",[5000,0],[7000,0],0],...],...]]

`expand` makes of such a line the lines of its events, numbered from the line's own seq on, before anybody counts or decodes
lines; so nothing but the bytes on the disk differs. What a moment means belongs to the form: lines that are written stay as
they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import nan

import msgspec

from unskew.collector.events import CHUNK_KINDS, PAUSES, IterationCommitted, MicroBatchPacked, Span, SpanKind, Telemetry

Moment = tuple[int, int]
"""(the run's clock, time spent in waits for others so far), ns."""
Reading = tuple[int, int, int]
"""A moment at which the kernel was asked for how long the thread had been ready without a core (ns)."""
Piece = tuple[SpanKind, Moment, Moment, int | None]
"""A kind of work, its begin and end, its micro-batch."""

_START = b"["
_encode = msgspec.json.Encoder().encode


class LoopPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one rank did of an iteration between two moments. `group` names all ranks, `readings` begin with the last before;
    `stages`: of each chunk that of the pipeline, none = there is no pipeline.

    `commit` ends the iteration: when it began, its loss (None = not known) and its tokens. `plan_version`: the plan by which it
    was given its samples.
    """

    rank: int
    device: str
    group: str
    iteration: int
    begun: Moment
    ended: Moment
    pieces: list[Piece]
    packed: list[tuple[int, tuple[int, ...]]]
    readings: list[Reading]
    commit: tuple[int, float | None, int] | None = None
    plan_version: int = 0
    stages: list[int] = []

    @property
    def n_events(self) -> int:
        return len(self.pieces) + len(self.packed) + 1 + (self.commit is not None)

    def events(self) -> list[Telemetry]:
        """The watermark last."""
        pauses = [piece for piece in self.pieces if piece[0] in PAUSES]
        stages = iter(self.stages)
        spans = [_span(self, piece, pauses, next(stages, 0) if piece[0] in CHUNK_KINDS else None) for piece in self.pieces]
        wall_us, waited_us, ready_us = _spent_us(self, self.begun, self.ended)
        apart = [spans[self.pieces.index(piece)] for piece in _outermost(self.pieces)] if pauses else spans
        left_us = max(wall_us - sum(span.wall_us for span in apart), 0)
        left_waited_us = max(waited_us - sum(span.wait_dp_us or 0 for span in apart), 0)
        left_ready_us = max(ready_us - sum(span.runq_us or 0 for span in apart), 0)
        other = Span(
            kind="other", device=self.device, rank=self.rank, plan_version=self.plan_version, attempt=0,
            iteration=self.iteration, start_us=self.begun[0] // 1000, wall_us=left_us,
            compute_us=max(left_us - left_waited_us - left_ready_us, 0),
            wait_dp_us=None if self.stages else left_waited_us or None, runq_us=left_ready_us,
            wait_pp_us=left_waited_us or None if self.stages else None,
        )  # fmt: skip
        packed = [
            MicroBatchPacked(iteration=self.iteration, micro_batch=number, attempt=0, lengths=lengths)
            for number, lengths in self.packed
        ]
        return [*spans, *packed, other, *([] if self.commit is None else [_committed(self, *self.commit)])]


def line_of(seq: int, at_us: int, part: LoopPart) -> bytes:
    """A part as a line."""
    return _encode((seq, at_us, part)) + b"\n"


_decode = msgspec.json.Decoder(tuple[int, int, LoopPart]).decode


def expand(lines: bytes, line_of_event: Callable[[int, int, Telemetry], bytes]) -> bytes:
    """`lines` with those of events, as `line_of_event(seq, at_us, event)` writes them, in place of parts; what is neither
    stays."""
    if _START not in lines or not (lines.startswith(_START) or b"\n" + _START in lines):  # one byte is soon looked for
        return lines
    found = lines.splitlines(keepends=True)
    return b"".join(_expanded(line, line_of_event) if line.startswith(_START) else line for line in found)


def _expanded(line: bytes, line_of_event: Callable[[int, int, Telemetry], bytes]) -> bytes:
    try:
        seq, at_us, part = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return line
    return b"".join(line_of_event(number, at_us, event) for number, event in enumerate(part.events(), start=seq))


def _outermost(pieces: list[Piece]) -> list[Piece]:
    """Those that lie in no other."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda one: (one[1][0], -one[2][0])):
        if not found or piece[1][0] >= found[-1][2][0]:
            found.append(piece)
    return found


def _span(part: LoopPart, piece: Piece, pauses: list[Piece], stage: int | None) -> Span:
    """Its own time is without the pauses that it was interrupted by."""
    kind, begin, end, micro_batch = piece
    wall_us, waited_us, ready_us = _spent_us(part, begin, end)
    inside = [one for one in pauses if one is not piece and begin[0] <= one[1][0] and one[2][0] <= end[0]]
    paused_us = 0
    for one in _outermost(inside):
        of_wall_us, *of_others_us = _spent_us(part, one[1], one[2])
        paused_us += of_wall_us - sum(of_others_us)
    is_wait = kind == "all_reduce"
    return Span(
        kind=kind,
        device=part.device,
        rank=part.rank,
        plan_version=part.plan_version,
        attempt=0,
        iteration=part.iteration,
        start_us=begin[0] // 1000,
        wall_us=wall_us,
        micro_batch=micro_batch,
        first_layer=stage,
        n_layers=None if stage is None else 1,
        group=part.group if is_wait else None,
        group_seq=part.iteration if is_wait else None,
        compute_us=None if is_wait else max(wall_us - waited_us - ready_us - paused_us, 0),
        wait_dp_us=waited_us or None,
        runq_us=ready_us,
    )


def _spent_us(part: LoopPart, begin: Moment, end: Moment) -> tuple[int, int, int]:
    """Between two moments: by the clock, waiting for others, ready without a core."""
    ready_ns = _ready_ns(part.readings, end) - _ready_ns(part.readings, begin)
    return (end[0] - begin[0]) // 1000, (end[1] - begin[1]) // 1000, ready_ns // 1000


def _ready_ns(readings: list[Reading], moment: Moment) -> int:
    """Spread evenly, between two readings, over the time that was not spent waiting for others."""
    after = bisect_left(readings, moment[0], key=lambda one: one[0])
    if after == 0 or after == len(readings):
        return readings[min(after, len(readings) - 1)][2]
    (since_ns, since_waited, since_ready), (until_ns, until_waited, until_ready) = readings[after - 1 : after + 1]
    long_ns = until_ns - until_waited - (since_ns - since_waited)
    passed_ns = moment[0] - moment[1] - (since_ns - since_waited)
    return since_ready + (until_ready - since_ready) * passed_ns // long_ns if long_ns > 0 else until_ready


def _committed(part: LoopPart, begun_ns: int, loss: float | None, tokens: int) -> IterationCommitted:
    return IterationCommitted(
        iteration=part.iteration,
        plan_version=part.plan_version,
        attempt=0,
        rank=part.rank,
        loss=nan if loss is None else loss,
        tokens=tokens,
        start_us=begun_ns // 1000,
        wall_us=(part.ended[0] - begun_ns) // 1000,
        log_complete=True,
    )
