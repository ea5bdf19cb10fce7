"""Parts of a rank's step that a source has timed and not placed: spans, laid one after the other from where the step begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unskew.collector.events import CHUNK_KINDS, COLLECTIVE_KINDS, IterationTimed, Span, SpanKind


def spans_of(
    step: IterationTimed, rank: int, begin_us: int, parts: Iterable[tuple[SpanKind, int]], *, stage: int | None = None
) -> Iterator[Span]:
    """`parts`: kind and microseconds of each, in their order; `stage`: where in a pipeline the rank is."""
    for kind, wall_us in parts:
        chunk = kind in CHUNK_KINDS
        yield Span(
            kind=kind,
            device=str(rank),
            rank=rank,
            plan_version=0,
            attempt=step.attempt,
            iteration=step.iteration,
            start_us=begin_us,
            wall_us=wall_us,
            micro_batch=0 if chunk else None,
            first_layer=stage if chunk else None,
            n_layers=1 if chunk and stage is not None else None,
            posted_us=begin_us if kind in COLLECTIVE_KINDS else None,
        )
        begin_us += wall_us
