"""What a log lacks for a judgement of the whole job: ranks, iterations and times that nobody saw.

Calm is a claim about every rank and all of the time. Nothing is wrong with what was recorded says little when the slow rank's
file is missing, or its times are empty just where it is slow. So what was recorded is held against what is known to exist:
ranks by the declared size of the job and by those that others name, the iterations between the first and the last, and for each
rank in each iteration the kinds of work that others have, and its time up to the beginning of the next iteration. A rank that
is missing is a gap, and so is more than `MOST_MISSING` of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import polars as pl

from unskew.analytics.core.outcome import LEAST_LOST_SHARE
from unskew.analytics.diagnosis.ranks.rank_times import with_expected
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.clocks import why_clocks_disagree
from unskew.analytics.diagnosis.trace.model import PAUSES, Trace
from unskew.analytics.diagnosis.trace.replay import TraceRecording
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.collector.events import CHUNK_KINDS, CHUNK_NAMES, COLLECTIVE_KINDS

MOST_MISSING = 0.1
LEAST_ITERATIONS = 8
"""So many are asked for; fewer show no change."""
MOST_SHOWN = 4


def gaps_of(log: RunLog, *, chunks: bool, sections: Sequence[TraceSection] = ()) -> list[str]:
    """What the log lacks, beside what it says itself, for a judgement of the whole run, which goes by its `chunks` or by less;
    of an imported one also what its `sections` leave out."""
    if log.imported:
        return [*_of_recording(log, sections), *_left_out(log, [one.recording for one in sections])]
    found = list[str]()
    numbers = log.iterations["iteration"]
    if numbers.len() and (missing := int(numbers[-1]) - int(numbers[0]) + 1 - numbers.n_unique()):
        found.append(f"{missing} iterations are not in the log")
    incomplete = sum(not released.committed.log_complete for released in log.released) if chunks else 0
    if incomplete > MOST_MISSING * len(log.released):
        found.append(f"the log of {incomplete} of {len(log.released)} iterations is not complete")
    return found


def earlier_attempts(log: RunLog) -> list[str]:
    """That iterations were executed again, whose earlier attempts nobody judges, or from where to where they may have been."""
    back = [
        f"whether iterations from {to} to {since} count: the job was restarted between two of its lines"
        for to, since in sorted({tuple(one) for one in log.options.get("facts", {}).get("went_back", ())})
    ]
    if not (again := log.redone):
        return back
    which = f"iteration {again[0]}" if len(again) == 1 else f"{len(again)} iterations from {again[0]} to {again[-1]}"
    return [
        *back,
        f"time lost in earlier attempts: {which} executed more than once; the last attempt counts, with what it kept",
    ]


def _gone_back(log: RunLog) -> list[str]:
    """That a job was restarted between two lines of its log: it does not show which of them count."""
    numbers = log.iterations["iteration"].drop_nulls().to_numpy()
    back = [(to, since) for to, since in log.options.get("facts", {}).get("went_back", ())]
    among_them = sum(any(to <= one <= since for to, since in back) for one in numbers.tolist())
    if among_them <= MOST_MISSING * len(numbers):
        return []
    return [f"{among_them} of {len(numbers)} iterations are of a job that was restarted there, before or after it"]


def _of_recording(log: RunLog, sections: Sequence[TraceSection]) -> list[str]:
    """Of an imported one; what one of our own runs lacks its own events say."""
    between = _unjudged(_time_between(log), "between what is recorded of an iteration and the beginning of the next", least=0.0)
    found = [*_missing_ranks(log), *_missing_iterations(log), *_gone_back(log), *between]
    trace, waits = log.trace, (*COLLECTIVE_KINDS, "send", "recv")
    if trace.has_chunks:
        beside = _unjudged(_time_outside(log, (*CHUNK_KINDS, *waits, *PAUSES)), "outside its recorded passes and waits")
        fast = one_is_fast(log, sections)
        return [*found, *_missing_work(trace, CHUNK_KINDS), *_unmeasured(trace), *beside, *fast]
    if trace.kinds & set(COLLECTIVE_KINDS):
        beside = _unjudged(_time_in(log, "data_wait"), "waiting for input, and nobody is seen to wait for that", least=0.0)
        clocks = why_clocks_disagree(trace)
        return [*found, *_missing_work(trace, COLLECTIVE_KINDS), *beside, *([clocks] if clocks else [])]
    return [*found, *_missing_steps(log.steps)]


def _missing_ranks(log: RunLog) -> list[str]:
    """Ranks that the job has, or that others exchange messages with, and of which nothing is recorded."""
    operations = log.trace.operations
    recorded = {*operations["rank"].drop_nulls().to_list(), *log.steps["rank"].drop_nulls().to_list()}
    if not recorded:
        return []
    declared = log.options.get("facts", {}).get("world_size")
    named = {*recorded, *operations["peer"].drop_nulls().to_list()}
    known = max(max(named) + 1, declared if isinstance(declared, int) else 0, log.ranks)
    if known == len(recorded):
        return []
    shown = list(islice((rank for rank in range(known) if rank not in recorded), MOST_SHOWN))
    return [f"{_list('rank', shown, known - len(recorded))} left no record, of {known} ranks"]


def _missing_iterations(log: RunLog) -> list[str]:
    """Iterations between the first and the last, where most follow upon each other: else only every n-th was written down."""
    numbers = np.unique(log.iterations["iteration"].drop_nulls().to_numpy())
    if len(numbers) < LEAST_ITERATIONS:
        recorded = "1 iteration is" if len(numbers) == 1 else f"{len(numbers)} iterations are"
        return [f"only {recorded} recorded, at least {LEAST_ITERATIONS} are needed"] if len(numbers) else []
    span = int(numbers[-1] - numbers[0]) + 1
    missing = span - len(numbers)
    if np.mean(np.diff(numbers) == 1) > 0.5 and missing > MOST_MISSING * span:
        return [f"{missing} of {span} iterations are not in the log"]
    return []


def _left_out(log: RunLog, recordings: Sequence[TraceRecording]) -> list[str]:
    """Iterations of which devices were not judged: they are unlike most, or an earlier attempt of them does not count."""
    unlike = sum(len(one.left_out) for one in recordings)
    of = unlike + sum(len(one.iterations) for one in recordings)
    found = [f"{unlike} of {of} iterations lack operations that most have"] if unlike > MOST_MISSING * of else []
    if len(log.redone) > MOST_MISSING * log.iterations.height:
        found.append(f"{len(log.redone)} of {log.iterations.height} iterations were executed again, and one attempt counts")
    return found


def _missing_work(trace: Trace, kinds: Sequence[str]) -> list[str]:
    """The rank that lacks a kind of work in most iterations: every rank does each kind in each iteration."""
    done = trace.operations.filter(pl.col("kind").is_in(list(kinds)))
    if kinds is COLLECTIVE_KINDS:  # which of them a rank takes part in depends on its stage
        done = done.with_columns(kind=pl.lit("collective"))
    times = done.select("rank", "kind", "iteration").unique().group_by("rank", "kind").len()
    present = {(rank, kind): n for rank, kind, n in times.iter_rows()}
    ranks, seen = trace.operations["rank"].unique().sort().to_list(), sorted({kind for _, kind in present})
    iterations = done["iteration"].n_unique()
    lacking = max(((iterations - present.get((rank, kind), 0), rank, kind) for rank in ranks for kind in seen), default=None)
    if lacking is None or lacking[0] <= MOST_MISSING * iterations:
        return []
    missing, rank, kind = lacking
    name = CHUNK_NAMES.get(kind, kind)
    return [f"rank {rank} has no {name} times in {missing} of {iterations} iterations"]


def _missing_steps(steps: pl.DataFrame) -> list[str]:
    """The rank of which most steps are missing, where steps are timed rank by rank."""
    iterations = steps["iteration"].n_unique()
    per_rank = steps.group_by("rank").agg(n=pl.col("iteration").n_unique()).sort("n")
    if not iterations or per_rank["n"][0] >= (1 - MOST_MISSING) * iterations:
        return []
    return [f"rank {per_rank['rank'][0]} has times of {per_rank['n'][0]} of {iterations} steps"]


def _unmeasured(trace: Trace) -> list[str]:
    """Chunks that took no time at all: a clock or a column that shows nothing."""
    chunks = trace.operations.filter(pl.col("kind").is_in(CHUNK_KINDS))
    empty = chunks.group_by("rank", "kind").agg(share=(pl.col("wall_us") <= 0).mean()).sort("share", descending=True)
    if not empty.height or empty["share"][0] <= MOST_MISSING:
        return []
    name = CHUNK_NAMES.get(empty["kind"][0], empty["kind"][0])
    return [f"{100 * empty['share'][0]:.0f} % of the {name} times of rank {empty['rank'][0]} are zero"]


def _time_outside(log: RunLog, kinds: Sequence[str]) -> pl.DataFrame:
    """iteration, rank, share of the rank's step that no operation of these kinds covers, where steps are timed rank by rank."""
    inside = _sums(log.trace.operations.filter(pl.col("kind").is_in(list(kinds))))
    if log.trace.votes:
        inside = pl.concat([inside, _waits_for_votes(log.trace)]).group_by("iteration", "rank").agg(pl.col("us").sum())
    return (
        log.steps.filter(pl.col("wall_us") > 0)
        .join(inside, on=["iteration", "rank"], how="left")
        .select("iteration", "rank", share=((pl.col("wall_us") - pl.col("us")) / pl.col("wall_us")).clip(0.0, 1.0))
        .drop_nulls()
    )


def _waits_for_votes(trace: Trace) -> pl.DataFrame:
    """iteration, rank, us from what a rank had last to do or to sum until it steps, which is when all have voted."""
    end, steps = pl.col("start_us") + pl.col("wall_us"), pl.col("kind") == "optimizer"
    last = end.filter(pl.col("kind").is_in([*CHUNK_KINDS, *COLLECTIVE_KINDS])).max()
    waited = trace.operations.group_by("iteration", "rank").agg(us=pl.col("start_us").filter(steps).min() - last)
    return waited.drop_nulls().with_columns(pl.col("us").clip(lower_bound=0.0))


def _time_between(log: RunLog) -> pl.DataFrame:
    """iteration, rank, share of the time from the rank's beginning of an iteration to that of the next that lies behind what is
    judged of it (behind the last operation, where chunks are known; else own time is what is left of the step): what every rank
    has of it, and what this one has more than others with its layers, as a pipeline's stages begin one after the other. Empty
    where one clock does not go through all iterations: steps that only last, or times from the beginning of each step."""
    begin, end = pl.col("start_us").cast(pl.Float64), (pl.col("start_us") + pl.col("wall_us")).cast(pl.Float64)
    steps = log.steps.select("iteration", "rank", begin_us=begin, end_us=None if log.trace.has_chunks else end)
    if steps["begin_us"].null_count():
        return pl.DataFrame(schema={"iteration": pl.Int64, "rank": pl.Int64, "share": pl.Float64})
    operations = log.trace.operations.select("iteration", "rank", begin_us=begin, end_us=end)
    extents = (
        pl.concat([operations, steps], how="vertical_relaxed").group_by("iteration", "rank")
        .agg(pl.col("begin_us").min(), pl.col("end_us").max()).drop_nulls().sort("rank", "iteration")
    )  # fmt: skip
    next_us, following = (pl.col(name).shift(-1).over("rank") for name in ("begin_us", "iteration"))
    chunks = log.trace.operations.filter(pl.col("kind").is_in(CHUNK_KINDS))
    stages = chunks.group_by("rank").agg(stage=pl.coalesce("first_layer", "stage").min())
    left = pl.col("left_us")
    return (
        extents.with_columns(whole_us=next_us - pl.col("begin_us"), left_us=(next_us - pl.col("end_us")).clip(lower_bound=0.0))
        .filter((following == pl.col("iteration") + 1) & (pl.col("whole_us") > 0))
        .join(stages, on="rank", how="left")
        .with_columns(left_us=left - left.min().over("iteration", "stage") + left.min().over("iteration"))
        .select("iteration", "rank", share=left / pl.col("whole_us"))
    )


def _time_in(log: RunLog, kind: str) -> pl.DataFrame:
    """iteration, rank, share of the iteration that the rank's operations of one kind took."""
    mine = _sums(log.trace.operations.filter(kind=kind)).join(log.iterations.drop_nulls(), on="iteration")
    # What lasts longer than the iteration, as an input that is waited for outside of the timed step, is all of the time.
    return mine.select("iteration", "rank", share=pl.col("us") / pl.max_horizontal("iteration_us", "us", pl.lit(1.0)))


def _sums(operations: pl.DataFrame) -> pl.DataFrame:
    return operations.group_by("iteration", "rank").agg(us=pl.col("wall_us").sum())


def _unjudged(shares: pl.DataFrame, where: str, least: float | None = None) -> list[str]:
    """The rank with more time than `least` (None: than others) in what nobody judges, in more than a few iterations: as much as
    would be named if its cause were known."""
    more = pl.col("share") - (pl.col("share").min().over("iteration") if least is None else least)
    often = (
        shares.filter(more > LEAST_LOST_SHARE)
        .group_by("rank")
        .agg(n=pl.len(), share=pl.col("share").median())
        .sort("n", "rank")
    )
    if not often.height or often["n"][-1] <= MOST_MISSING * shares["iteration"].n_unique():
        return []
    return [f"{100 * often['share'][-1]:.0f} % of the time of rank {often['rank'][-1]} is {where}"]


def one_is_fast(log: RunLog, sections: Sequence[TraceSection]) -> list[str]:
    """A rank that takes much less than its peers, over what lengths let expect where a section has them, in either half of an
    imported recording: then most of them are slow, or it has less to do."""
    if not log.imported:
        return []
    by_lengths = next((one for one in sections if one.lengths_logged), None)
    chunks = log.trace.operations.filter(pl.col("kind").is_in(CHUNK_KINDS) & pl.col("stage").is_not_null())
    over = pl.col("wall_us").sum() / pl.col("expected_us").sum()
    mean = with_expected(chunks, by_lengths).group_by("kind", "stage", "iteration", "rank").agg(us=over)
    peers = mean.with_columns(
        of_peers=pl.col("us") / pl.col("us").median().over("kind", "stage", "iteration"),
        n=pl.len().over("kind", "stage", "iteration"),
        late=pl.col("iteration") > pl.col("iteration").median(),
    ).filter(pl.col("of_peers").is_finite() & (pl.col("n") > 2))
    fastest = peers.group_by("kind", "rank", "late").agg(ratio=pl.col("of_peers").median()).sort("ratio", "rank")
    if not fastest.height or fastest["ratio"][0] >= 1 - MOST_MISSING:
        return []
    kind, rank = CHUNK_NAMES[fastest["kind"][0]], fastest["rank"][0]
    return [f"rank {rank} takes {fastest['ratio'][0]:.2f} of its peers' {kind} time: they are slow, or it has less to do"]


def _list(what: str, shown: Sequence[int], of: int) -> str:
    """The first few of `of` numbers: ``ranks 1, 2 and 5 more``."""
    more = f" and {of - len(shown)} more" if of > len(shown) else ""
    return f"{what}{'s' * (of > 1)} {', '.join(map(str, shown))}{more}"
