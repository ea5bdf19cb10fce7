"""What each rank took per iteration, out of a trace or of recorded step times, and whether ranks can be compared by it.

A time that holds the wait for others accuses its victims. So a backward pass counts only where collectives are recorded apart
from it (DDP reduces gradients within `backward()`), no pass counts that ends together on ranks that began it at different
times (which no clocks show that disagree), and whole steps count only of ranks that are seen to be independent (lockstep.py).
"""

from __future__ import annotations

import numpy as np
import polars as pl

from unskew.analytics.core.outcome import Findings, Sight
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.detector.workers import RankTimes, judge_workers
from unskew.analytics.diagnosis.ranks.lockstep import end_together, why_in_step
from unskew.analytics.diagnosis.trace.clocks import why_clocks_disagree
from unskew.analytics.diagnosis.trace.model import Trace
from unskew.analytics.diagnosis.trace.section import KIND, TraceSection
from unskew.collector.events import CHUNK_KINDS, COLLECTIVE_KINDS

LEAST_ITERATIONS = 4
OF_CHUNK = ["kind", "rank", "micro_batch", "iteration"]
WORK = {"F": "a forward pass", "B": "a backward pass", "W": "computing weight gradients"}
HOLDS_REDUCTION = "backward times may hold the all-reduce, as no collective is recorded apart from them"
ENDS_TOGETHER = "{kind} ends together on all ranks, whenever they begin it, so its time holds waiting for the others"


def follow_ranks(trace: Trace, options: DetectorOptions, by_lengths: TraceSection | None = None) -> tuple[Findings, str]:
    """A trace that does not tell what a single chunk should take (of one stage, a rank's forward and backward explain each
    other; or nobody knows what waits for what): a rank's mean chunk of each kind in an iteration against its own past and the
    ranks with the same layers, over what their lengths let expect where the section `by_lengths` has them. Iterations with more
    or fewer chunks than most are left out. Also why some kind of work could not be used ("" = all was): then nobody may be
    called well."""
    chunks = trace.operations.filter(pl.col("kind").is_in(CHUNK_KINDS) & pl.col("stage").is_not_null())
    chunks = chunks.with_columns(n=pl.len().over("iteration")).filter(pl.col("n") == pl.col("n").mode().max())
    role_of = dict(chunks.group_by("rank").agg(pl.coalesce("first_layer", "stage").min()).sort("rank").iter_rows())
    kinds = tuple(sorted(chunks["kind"].unique()))
    clocks = why_clocks_disagree(trace)
    blurred = dict.fromkeys(kinds, clocks) if clocks else _blurred(trace, chunks, kinds, role_of)
    clear = tuple(kind for kind in kinds if kind not in blurred)
    why = "; ".join(dict.fromkeys(blurred.values()))
    if not clear:
        return Findings(sight=Sight(scope="device", smallest_slowdown=None, why=why)), why
    known, chunks = by_lengths is not None, with_expected(chunks, by_lengths)
    iterations = tuple(chunks["iteration"].unique().sort().to_list())
    mean = chunks.group_by("kind", "iteration", "rank").agg(us=pl.col("own_us").sum() / pl.col("expected_us").sum())
    us = np.stack([_table(mean.filter(kind=kind), "us", iterations, tuple(role_of)) for kind in clear])
    found = judge_workers(RankTimes(clear, iterations, role_of, us), options, equal_work=True, lengths_known=known)
    if why:
        found = Findings(verdicts=found.verdicts, sight=Sight(scope="device", smallest_slowdown=None, why=why))
    return found, why


def with_expected(chunks: pl.DataFrame, by_lengths: TraceSection | None) -> pl.DataFrame:
    """Chunks with `expected_us`: what their lengths let expect, of those in the section; 1 where lengths are not known."""
    if by_lengths is None:
        return chunks.with_columns(expected_us=1.0)
    operations, iterations = by_lengths.recording.graph.operations, by_lengths.recording.iterations
    places = [(i, KIND[one.kind], one.rank, one.micro_batch) for i, one in enumerate(operations) if one.micro_batch is not None]
    expected = pl.DataFrame(
        [(*chunk, at, by_lengths.expected_us[i, column]) for i, *chunk in places for column, at in enumerate(iterations)],
        schema=[*OF_CHUNK, "expected_us"],
        orient="row",
    )
    return chunks.join(expected, on=OF_CHUNK)


def follow_steps(steps: pl.DataFrame, options: DetectorOptions) -> tuple[Findings, bool]:
    """Step times of ranks (`steps`: iteration, rank, start_us, wall_us): each rank against its own past, where they are seen
    not to wait for each other; and whether they are."""
    ranks = tuple(steps["rank"].unique().sort().to_list())
    full = steps.with_columns(n=pl.len().over("iteration")).filter(pl.col("n") == len(ranks))
    iterations = tuple(full["iteration"].unique().sort().to_list())
    if not ranks:
        why = "only the times of whole iterations are known, which show no rank by itself"
    elif len(iterations) < LEAST_ITERATIONS:
        why = f"{len(iterations)} steps have the times of all {len(ranks)} ranks, at least {LEAST_ITERATIONS} are needed"
    else:
        us, start_us = (_table(full, name, iterations, ranks) for name in ("wall_us", "start_us"))
        why = why_in_step(us, None if np.isnan(start_us).any() else start_us)
    if why:
        return Findings(sight=Sight(scope="device", smallest_slowdown=None, why=why)), False
    return judge_workers(RankTimes(("step",), iterations, dict.fromkeys(ranks, 0), us[None]), options, equal_work=False), True


def _blurred(trace: Trace, chunks: pl.DataFrame, kinds: tuple[str, ...], role_of: dict[int, int]) -> dict[str, str]:
    """Kind of work -> why its times cannot be compared between ranks."""
    found = {}
    shared = len(set(role_of.values())) < len(role_of)
    for kind in kinds:
        if kind == "B" and shared and not trace.kinds & set(COLLECTIVE_KINDS):
            found[kind] = HOLDS_REDUCTION
        last = chunks.filter(kind=kind).sort("start_us").unique(["iteration", "rank"], keep="last")
        iterations = tuple(last["iteration"].unique().sort().to_list())
        for role in set(role_of.values()):
            peers = tuple(rank for rank, own in role_of.items() if own == role)
            us, start_us = (_table(last, name, iterations, peers) for name in ("wall_us", "start_us"))
            seen = ~(np.isnan(us) | np.isnan(start_us)).any(axis=1)
            if len(peers) > 1 and seen.any() and end_together(us[seen], start_us[seen]):
                found.setdefault(
                    kind, ENDS_TOGETHER.format(kind={"F": "a forward", "B": "a backward"}.get(kind, "a") + " pass")
                )
    return found


def _table(rows: pl.DataFrame, values: str, iterations: tuple[int, ...], ranks: tuple[int, ...]) -> Floats:
    """[iteration, rank], nan = not recorded."""
    found = np.full((len(iterations), len(ranks)), np.nan)
    row, column = ({key: i for i, key in enumerate(keys)} for keys in (iterations, ranks))
    for iteration, rank, value in rows.select("iteration", "rank", pl.col(values).cast(pl.Float64)).iter_rows():
        if rank in column and value is not None:
            found[row[iteration], column[rank]] = value
    return found
