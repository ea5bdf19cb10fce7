"""The document lengths of a run's micro-batches: they go out with its chunks, as they say what these should take."""

from __future__ import annotations

import polars

from unskew.collector.read.reader import Reader

_LENGTHS = """
    select iteration, micro_batch, arg_max(lengths, attempt) as lengths from micro_batches where run = ?
    group by iteration, micro_batch order by iteration, micro_batch
"""


def lengths_of(reader: Reader, run: str) -> polars.DataFrame:
    """iteration, micro_batch, lengths (tokens); empty where the log has none."""
    return reader.sql(_LENGTHS, [run])
