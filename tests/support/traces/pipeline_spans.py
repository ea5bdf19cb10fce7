"""The spans that ranks would write of a pipeline's timeline."""

from __future__ import annotations

import numpy as np

from unskew.analytics.pipeline.schedule import Timeline
from unskew.collector.events import Span


def logged(timeline: Timeline, message_us: float, iteration: int = 0, start_us: float = 0.0) -> list[Span]:
    """Chunks, sends, and receives that begin when the rank has nothing else to do; ended by their end, rank by rank."""
    order, chunks = timeline.schedule.order, timeline.schedule.chunks
    spans = []

    def write(kind: str, position: int, begin_us: float, end_us: float, peer: int | None = None) -> None:
        action = order[position]
        spans.append(
            Span(
                kind=kind,
                device=f"cpu-{action.rank}",
                rank=action.rank,
                plan_version=0,
                attempt=0,
                iteration=iteration,
                start_us=round(start_us + begin_us),
                wall_us=round(end_us - begin_us),
                micro_batch=action.micro_batch,
                first_layer=action.first_layer,
                n_layers=action.n_layers if peer is None else None,
                peer=peer,
            )
        )

    crossing = np.flatnonzero(chunks.crosses).tolist()
    for position in range(len(order)):
        if position in crossing:
            before, source = chunks.before[position], chunks.given[position]
            free, sent = timeline.end_us[before] if before >= 0 else 0.0, timeline.end_us[source]
            write("recv", position, free, max(sent + message_us, free), order[source].rank)
            write("send", source, sent, sent + message_us, order[position].rank)
        write(order[position].kind, position, timeline.start_us[position], timeline.end_us[position])
    return sorted(spans, key=lambda span: (span.rank, span.start_us + span.wall_us, span.start_us))
