"""straggler-analysis: the operation traces of ByteDance's what-if analysis (NDTimeline), Parquet with 11 columns.

One row is one operation of one worker in one training step. Seconds; `start_ts` counts from the beginning of the step. Send,
receive and collective durations include waiting for the peer; compute durations do not. `mc` is the model chunk on its stage,
`gmc` in the model, `mb_id` the micro-batch; -1 where a number has no meaning. Several columns may come in wider types; times
are kept to the last bit, also those of 64 bits.

A file that we wrote has the lengths of the micro-batches' documents in its metadata.

`ImportedRun` holds the rows twice: as `OperationsRecorded`, exact, and as `Span`s in microseconds, for all that reads spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import polars
import pyarrow.parquet  # type: ignore[import-untyped]  # it ships no types

from unskew.collector.events import (
    CHUNK_KINDS,
    IterationTimed,
    MicroBatchPacked,
    OperationsRecorded,
    Span,
    SpanKind,
    Telemetry,
)
from unskew.collector.formats.columns import parquet, typed
from unskew.collector.formats.imported import LARGEST, FormatError, ImportedRun

if TYPE_CHECKING:
    from unskew.collector.read.reader import Reader

COLUMNS: dict[str, Any] = {
    "dp_rank": polars.Int16, "stage": polars.Int16, "rank": polars.Int32, "step": polars.Int64, "optype": polars.String,
    "start_ts": polars.Float64, "duration": polars.Float64, "seq_id": polars.Int32, "mc": polars.Int16, "mb_id": polars.Int16,
    "gmc": polars.Int16,
}  # fmt: skip
"""The columns in the order of the published files, and the type of each in what `operations` returns."""

KINDS: dict[str, SpanKind] = {
    "forward-compute": "F",
    "backward-compute": "B",
    "forward-send": "send",
    "forward-recv": "recv",
    "backward-send": "send",
    "backward-recv": "recv",
    "params-all-gather": "all_gather",
    "grads-reduce-scatter": "reduce_scatter",
    "layernorm-grads-all-reduce": "all_reduce",
    "embedding-grads-all-reduce": "all_reduce",
    "separate-grads-all-reduce": "all_reduce",
    "optimizer-clip-main-grad": "optimizer",
    "optimizer": "optimizer",
    "gc": "gc",
}
LENGTHS = b"unskew.lengths"
"""In a file's metadata: JSON, [iteration, micro-batch, [tokens of each document]] of every micro-batch."""
_Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
_TOWARDS = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""The other side of a message: so many stages further on."""
_IDENTITY = ("rank", "step", "optype", "seq_id")


def read(path: Path) -> Sequence[ImportedRun]:
    """The run in a Parquet file. Raises `FormatError`."""
    rows = _checked(path, _load(path))
    place = rows.select("rank", "dp_rank", "stage").unique().sort("rank")
    rank_at = {(replica, stage): rank for rank, replica, stage in place.iter_rows()}
    steps = rows["step"].n_unique()
    facts = {
        "replicas": place["dp_rank"].n_unique(),
        "stages": place["stage"].n_unique(),
        "chunks_per_stage": max(1, int(rows["mc"].max()) + 1),  # type: ignore[arg-type]
        "micro_batches": int(rows["mb_id"].max()) + 1,  # type: ignore[arg-type]
        "operations": rows.height,
    }
    events = chain(_packed(path), _events(rows, rank_at))
    return [ImportedRun(events=events, ranks=place.height, iterations=steps, facts=facts)]


def operations(reader: Reader, run: str, part: str = "true") -> polars.DataFrame:
    """The rows of an imported run as its source had them: `COLUMNS`, by step and rank, inside these in the source's order;
    `part`: a condition on the iteration."""
    lists = {
        "optype": "name", "start_ts": "start_s", "duration": "duration_s", "seq_id": "sequence", "mc": "chunk",
        "mb_id": "micro_batch", "gmc": "global_chunk",
    }  # fmt: skip
    of_type = {"optype": "varchar", "start_ts": "double", "duration": "double"}
    unnested = ", ".join(
        f"unnest((payload->'{field}')::{of_type.get(column, 'bigint')}[]) as {column}" for column, field in lists.items()
    )
    rows = reader.sql(
        f"""select (payload->>'replica')::bigint as dp_rank, (payload->>'stage')::bigint as stage,
               rank, iteration as step, {unnested}
            from events where run = ? and type = 'operations_recorded@1' and ({part}) order by iteration, rank""",
        [run],
    )
    return rows.select(polars.col(name).cast(dtype) for name, dtype in COLUMNS.items())


def _load(path: Path) -> polars.DataFrame:
    if not path.is_file():
        raise FormatError(f"{path}: a Parquet file is needed here")
    rows = parquet(path)
    missing = [name for name in COLUMNS if name not in rows.columns]
    if missing:
        raise FormatError(f"{path} lacks the columns {', '.join(missing)}; needed are {', '.join(COLUMNS)}")
    if rows.is_empty():
        raise FormatError(f"{path} has no rows")
    return typed(path, rows, {name: dtype() for name, dtype in COLUMNS.items()}, {})


def _packed(path: Path) -> list[MicroBatchPacked]:
    """What a file of ours says of its micro-batches."""
    given = (pyarrow.parquet.read_metadata(path).metadata or {}).get(LENGTHS, b"[]")
    try:
        found = msgspec.json.decode(given, type=list[tuple[_Number, _Number, tuple[_Number, ...]]])
    except msgspec.DecodeError as error:
        raise FormatError(f"{path}: its metadata {LENGTHS.decode()} are no lengths of documents ({error})") from error
    return [MicroBatchPacked(iteration=i, micro_batch=of, attempt=0, lengths=lengths) for i, of, lengths in found]


def _checked(path: Path, rows: polars.DataFrame) -> polars.DataFrame:
    column = polars.col
    wrong = {
        f"a value is missing (all of {', '.join(COLUMNS)} are needed)": polars.any_horizontal(polars.all().is_null()),
        f"its optype is none of {', '.join(KINDS)}": ~column("optype").is_in(list(KINDS)),
        "its start_ts or duration is not a finite number of seconds up to 2^33": ~polars.all_horizontal(
            column("start_ts", "duration").abs() <= LARGEST / 1e6
        ),
        "its duration is negative": column("duration") < 0,
        "its dp_rank, stage, rank or step is negative": polars.any_horizontal(column("dp_rank", "stage", "rank", "step") < 0),
        "its step is beyond 2^53": column("step") > LARGEST,
        "its rank has another dp_rank or stage in an earlier row": polars.any_horizontal(
            column("dp_rank", "stage") != column("dp_rank", "stage").first().over("rank")
        ),
        "an earlier row has the same rank, step, optype and seq_id": ~polars.struct(_IDENTITY).is_first_distinct(),
    }
    for sentence, condition in wrong.items():
        at = rows.select(condition.fill_null(value=False).arg_true()).to_series()
        if len(at):
            raise FormatError(f"{path}, row {at[0] + 1}: {sentence}")
    return rows


def _events(rows: polars.DataFrame, rank_at: dict[tuple[int, int], int]) -> Iterator[Telemetry]:
    stages = 1 + max(stage for _, stage in rank_at)
    rows = rows.sort("step", "rank", maintain_order=True)
    columns: dict[str, list[Any]] = {name: rows[name].to_list() for name in COLUMNS}
    start_us, wall_us = _microseconds(rows["start_ts"]), _microseconds(rows["duration"])
    keys = list(zip(columns["step"], columns["rank"], strict=True))
    begins = [place for place, key in enumerate(keys) if place == 0 or key != keys[place - 1]]
    for begin, end in pairwise([*begins, rows.height]):
        (iteration, rank), replica, stage = keys[begin], columns["dp_rank"][begin], columns["stage"][begin]
        own = {name: tuple(values[begin:end]) for name, values in columns.items()}
        yield OperationsRecorded(
            iteration=iteration,
            rank=rank,
            replica=replica,
            stage=stage,
            name=own["optype"],
            start_s=own["start_ts"],
            duration_s=own["duration"],
            sequence=own["seq_id"],
            chunk=own["mc"],
            global_chunk=own["gmc"],
            micro_batch=own["mb_id"],
        )
        for place in range(begin, end):
            name, micro_batch, wall = columns["optype"][place], columns["mb_id"][place], wall_us[place]
            kind, towards = KINDS[name], _TOWARDS.get(name)
            yield Span(
                kind=kind,
                device=str(rank),
                rank=rank,
                plan_version=0,
                attempt=0,
                iteration=iteration,
                start_us=start_us[place],
                wall_us=wall,
                micro_batch=None if micro_batch < 0 else micro_batch,
                group=name,
                group_seq=columns["seq_id"][place],
                peer=None if towards is None else rank_at.get((replica, (stage + towards) % stages)),
                compute_us=wall if kind in CHUNK_KINDS else None,
            )
        first_us = min(start_us[begin:end])
        last_us = max(start_us[place] + wall_us[place] for place in range(begin, end))
        yield IterationTimed(iteration=iteration, rank=rank, start_us=first_us, wall_us=last_us - first_us)


def _microseconds(seconds: polars.Series) -> list[int]:
    values: list[int] = (seconds.cast(polars.Float64) * 1e6).round().cast(polars.Int64).to_list()
    return values
