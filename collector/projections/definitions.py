"""What is projected: for each projection, how rows of the log become its rows, and how two sets of its rows become one.

`partial` aggregates any set of rows of the log; `merge` aggregates rows of the projection again. Every aggregate is a count,
sum, minimum, maximum or "and", so the log may be cut anywhere: ``merge(partial(a) + partial(b)) = merge(partial(a + b))``.
What is sealed is therefore aggregated once, a reader adds what is not, and the answer is that of the raw log.

`CODE` hashes all of this text; rows that other code made are made anew.
"""

from __future__ import annotations

import hashlib

import msgspec

from unskew.collector import events
from unskew.collector.events import tag_of
from unskew.collector.files.columns import own_columns
from unskew.collector.files.rows import quoted
from unskew.collector.files.upcasters import rows_of

BUCKET_ITERATIONS = 10
"""Iterations per row of `rollups`: 64 ranks, 5 kinds and 20,000 iterations are 640,000 rows."""

_SOURCE = "$source"


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """`rows` and `again`: a SELECT each, over the relation that stands for `$source`; `order`: how its files are sorted."""

    name: str
    rows: str
    again: str = f"select * from {_SOURCE}"
    order: str

    def partial(self, source: str) -> str:
        """This projection of the rows of the log in relation `source`."""
        return self.rows.replace(_SOURCE, source)

    def merge(self, source: str) -> str:
        """One projection of the projections in relation `source`."""
        return self.again.replace(_SOURCE, source)


_SUMS = ("wall_us", "compute_us", "wait_tp_us", "wait_dp_us", "wait_pp_us", "runq_us", "bytes")
_BUCKET = f"(iteration // {BUCKET_ITERATIONS} * {BUCKET_ITERATIONS})::integer"
_BEAT = ("at_us", "seq", "pid", "iteration", "progress", "activity", "age_us", "stalled_us", "waits_for")
_LAST_BEAT = f"unnest(max({{{', '.join(f'{name!r}: {name}' for name in _BEAT)}}}))"

_LAST_ATTEMPT = "attempt = last_attempt"
_WITH_LAST_ATTEMPT = "max(attempt) over (partition by run, iteration) as last_attempt"
"""An iteration that is executed again has several attempts, of which the last counts; `IterationJudged` has none."""


def _any_version(event: type[events.Event]) -> str:
    """A pattern for `like`."""
    return quoted(tag_of(event).partition("@")[0] + "@%")


_SPANS, _DROPS = _any_version(events.Span), _any_version(events.Dropped)

PROJECTIONS = {
    one.name: one
    for one in (
        Projection(
            name="control",
            rows=f"""
                select run, writer, seq, at_us, stream, version, actor, type, payload
                from {_SOURCE} where stream is not null""",
            order="type, run, seq",
        ),
        Projection(
            name="iterations",
            rows=f"""
                select run, iteration, max(epoch) as epoch, attempt, max(loss) as loss, max(tokens) as tokens,
                    max(wall_us) as iteration_us, count(*) as n_ranks, bool_and(log_complete) as log_complete,
                    min(start_us) as start_us, max(start_us + wall_us) as end_us, null::bigint as predicted_us
                from (select * from ({own_columns(events.IterationCommitted, _SOURCE)})
                      union all by name
                      select *, 0 as epoch from ({own_columns(events.IterationTimed, _SOURCE)}))
                group by run, iteration, attempt
                union all by name
                select run, iteration, 0 as n_ranks, max(predicted_us) as predicted_us
                from ({own_columns(events.IterationJudged, _SOURCE)}) group by run, iteration""",
            again=f"""
                select run, iteration, max(epoch) filter ({_LAST_ATTEMPT}) as epoch, max(attempt) as attempt,
                    max(loss) filter ({_LAST_ATTEMPT}) as loss, max(tokens) filter ({_LAST_ATTEMPT}) as tokens,
                    max(iteration_us) filter ({_LAST_ATTEMPT}) as iteration_us,
                    coalesce(sum(n_ranks) filter ({_LAST_ATTEMPT}), 0)::bigint as n_ranks,
                    bool_and(log_complete) filter ({_LAST_ATTEMPT}) as log_complete, max(predicted_us) as predicted_us,
                    min(start_us) as start_us, max(end_us) as end_us
                from (select *, {_WITH_LAST_ATTEMPT} from {_SOURCE}) group by run, iteration""",
            order="run, iteration",
        ),
        Projection(
            name="judged",
            rows=f"""
                select run, iteration, epoch, (one->>'rank')::bigint as rank, (one->>'f')::double as f,
                    (one->>'b')::double as b, (one->>'w')::double as w, (one->>'measured_us')::bigint as measured_us,
                    (one->>'predicted_us')::bigint as predicted_us, coalesce((one->>'score')::double, 0) as score
                from (select run, iteration, epoch, unnest(ranks::json[]) as one
                      from ({own_columns(events.IterationJudged, _SOURCE)}))""",
            order="run, iteration, rank",
        ),
        Projection(
            name="rollups",
            rows=f"""
                select run, {_BUCKET} as from_iteration, rank, kind, count(*) as n_spans, min(wall_us) as min_wall_us,
                    max(wall_us) as max_wall_us, {", ".join(f"sum({name})::bigint as {name}" for name in _SUMS)}
                from ({rows_of(events.Span, _SOURCE)}) group by all""",
            again=f"""
                select run, from_iteration, rank, kind, sum(n_spans)::bigint as n_spans, min(min_wall_us) as min_wall_us,
                    max(max_wall_us) as max_wall_us, {", ".join(f"sum({name})::bigint as {name}" for name in _SUMS)}
                from {_SOURCE} group by run, from_iteration, rank, kind""",
            order="run, from_iteration, rank, kind",
        ),
        Projection(
            name="writers",
            rows=f"""
                select run, writer, rank, count(*) as n_events, count(*) filter (type like {_SPANS}) as n_spans,
                    coalesce(sum((payload->>'count')::bigint) filter (type like {_DROPS}), 0)::bigint as n_dropped,
                    min(at_us) as first_us, max(at_us) as last_us, max(iteration) as last_iteration
                from {_SOURCE} group by run, writer, rank""",
            again=f"""
                select run, writer, rank, sum(n_events)::bigint as n_events, sum(n_spans)::bigint as n_spans,
                    sum(n_dropped)::bigint as n_dropped, min(first_us) as first_us, max(last_us) as last_us,
                    max(last_iteration) as last_iteration
                from {_SOURCE} group by run, writer, rank""",
            order="run, writer, rank",
        ),
        Projection(
            name="heartbeats",
            rows=f"select run, rank, {_LAST_BEAT} from ({own_columns(events.Heartbeat, _SOURCE)}) group by run, rank",
            again=f"select run, rank, {_LAST_BEAT} from {_SOURCE} group by run, rank",
            order="run, rank",
        ),
    )
}

CODE = hashlib.sha256(
    "\n".join(f"{one.name}\n{one.rows}\n{one.again}\n{one.order}" for one in PROJECTIONS.values()).encode()
).hexdigest()[:16]
