"""The spans in a profiler trace that we wrote ourselves, and the lengths of documents: in the arguments of its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from unskew.collector.events import MicroBatchPacked, Span, tag_of
from unskew.collector.formats.imported import FormatError
from unskew.collector.formats.text import duration, rank_number, whole

KEY = "unskew"
"""Of the run's name in a file, and of the span in an event's arguments."""
_NUMBERS = ("micro_batch", "first_layer", "n_layers", "bytes", "compute_us", "wait_tp_us")


def own_spans(file: Path, rank: int, events: Iterable[tuple[float, dict[str, Any]]]) -> Iterator[Span | MicroBatchPacked]:
    """From the beginning of each event and its arguments. Raises `FormatError`."""
    for start, arguments in events:
        span = arguments.get(KEY)
        if span is None:
            continue
        where = f"{file}, the span at {start:g} us"
        try:
            given = {name: span.get(name) for name in ("kind", "device", "group")}
            numbers = {name: whole(where, name, span[name], 0) for name in _NUMBERS if name in span}
            peer = {"peer": rank_number(where, span["peer"])} if "peer" in span else {}
            if "lengths" in span:
                lengths = tuple(whole(where, "lengths", one, 0) for one in span["lengths"])
                place = {name: whole(where, name, span.get(name), 0) for name in ("iteration", "micro_batch")}
                yield MicroBatchPacked(**place, attempt=0, lengths=lengths)
            yield msgspec.convert(
                {
                    "type": tag_of(Span), "rank": rank, "epoch": 0, "attempt": 0, "start_us": round(start), **given, **numbers,
                    **peer, "iteration": whole(where, "iteration", span.get("iteration")),
                    "wall_us": duration(where, "wall_us", span.get("wall_us"), 1),
                },
                Span,
            )  # fmt: skip
        except (AttributeError, TypeError, msgspec.ValidationError) as error:
            raise FormatError(f"{where}: {error}") from error
