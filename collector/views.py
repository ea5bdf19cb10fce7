"""The SQL views. Each stands on `log` (rows.py), so they are the same live, sealed and in the database.

Columns of an event's own are derived from its struct, with its defaults: a field added there appears here. Times `*_us` are
microseconds: `at_us`, `started_us`, `finished_us`, `last_us` wall clock, `start_us` and `posted_us` the run's clock.
"""

from __future__ import annotations

import json
import types
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import msgspec

from unskew.collector import events
from unskew.collector.events import Event, tag_of
from unskew.collector.rows import quoted

if TYPE_CHECKING:
    import duckdb

_SQL_TYPE = {int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN", str: "VARCHAR"}


def _sql_type(kind: Any) -> str:
    """The SQL type of a field: plain ones as such, texts of a fixed choice as VARCHAR, everything nested as JSON."""
    if get_origin(kind) in {Union, types.UnionType}:
        return _sql_type(next(part for part in get_args(kind) if part is not type(None)))
    if kind in _SQL_TYPE:
        return _SQL_TYPE[kind]
    choices = get_args(kind)
    return "VARCHAR" if choices and all(isinstance(choice, str) for choice in choices) else "JSON"


def own_columns(event: type[Event]) -> str:
    """A SELECT of an event type: run, writer, seq, at_us, actor and the event's own fields."""
    fields = [field for field in msgspec.structs.fields(event) if field.name != "run"]
    hints = {field.encode_name: _sql_type(field.type) for field in fields}
    columns = []
    for field in fields:
        name = f'own."{field.encode_name}"'
        default = field.default if field.default is not msgspec.NODEFAULT else None
        if default not in (None, msgspec.NODEFAULT):
            literal = quoted(default if isinstance(default, str) else json.dumps(default))
            name = f"coalesce({name}, {literal}::{hints[field.encode_name]})"
        columns.append(f'{name} as "{field.name}"')
    return (
        f"select run, writer, seq, at_us, actor, {', '.join(columns)} from (select run, writer, seq, at_us, actor, "
        f"json_transform(payload, {quoted(json.dumps(hints))}) as own from log where type = {quoted(tag_of(event))})"
    )


def _decision(decision: str, event: type[Event], *, by: str = "actor", reason: str = "reason", epoch: str = "null") -> str:
    return (
        f"select run, at_us, proposal, '{decision}' as decision, {by} as \"by\", {reason} as reason, "
        f"{epoch}::bigint as epoch, seq from ({own_columns(event)})"
    )


_SPAN = "run, device, rank, epoch, attempt, iteration, micro_batch, kind, start_us, wall_us"
_WAITS = "compute_us, wait_tp_us, wait_dp_us, wait_pp_us, runq_us"

VIEWS: dict[str, str] = {
    "events": """
        select run, pos, writer, seq, at_us, stream, version, actor, type, iteration, rank,
            payload::json as payload
        from log""",
    "spans": f"""
        select {_SPAN}, first_layer, n_layers, "group", group_seq, peer, bytes, posted_us, {_WAITS}, writer, seq, at_us
        from log where type = '{tag_of(events.Span)}'""",
    "chunks": f"select {_SPAN}, first_layer, n_layers, {_WAITS} from spans where kind in ('F', 'B', 'W')",
    "transfers": f"""
        select {_SPAN}, peer, bytes, posted_us, start_us + wall_us as end_us from spans where kind in ('send', 'recv')""",
    "collectives": f"""
        select {_SPAN}, "group", group_seq, bytes, posted_us, start_us + wall_us as end_us, {_WAITS}
        from spans where kind in ('all_reduce', 'reduce_scatter', 'all_gather')""",
    "micro_batches": f"""
        select run, iteration, micro_batch, attempt, len(length) as n_documents, list_sum(length)::bigint as tokens,
            list_sum(list_transform(length, lambda one: one * one))::bigint as sum_sq, length as lengths
        from (select run, iteration, micro_batch, attempt, lengths::bigint[] as length
              from ({own_columns(events.MicroBatchPacked)}))""",
    "heartbeats": own_columns(events.Heartbeat),
    "judged": f"""
        select run, iteration, epoch, (one->>'rank')::bigint as rank, (one->>'f')::double as f, (one->>'b')::double as b,
            (one->>'w')::double as w, (one->>'measured_us')::bigint as measured_us,
            (one->>'predicted_us')::bigint as predicted_us, coalesce((one->>'score')::double, 0) as score
        from (select run, iteration, epoch, unnest(ranks::json[]) as one from ({own_columns(events.IterationJudged)}))""",
    "iterations": f"""
        select committed.*, judged.predicted_us
        from (select run, iteration, max(epoch) as epoch, max(attempt) as attempt, any_value(loss) as loss,
                any_value(tokens) as tokens, max(wall_us) as iteration_us, count(*) as n_ranks,
                bool_and(log_complete) as log_complete
              from ({own_columns(events.IterationCommitted)}) group by run, iteration) committed
        left join (select run, iteration, max(predicted_us) as predicted_us
                   from ({own_columns(events.IterationJudged)}) group by run, iteration) judged using (run, iteration)""",
    "runs": f"""
        select started.run, started.device, started.clock, coalesce(changed.mode, started.mode) as mode, started.ranks,
            coalesce(finished.status, 'unfinished') as status, finished.reason,
            coalesce(finished.iterations, committed.iterations, 0) as iterations, started.at_us as started_us,
            finished.at_us as finished_us, last.last_us, started.version, started.code, started.options
        from ({own_columns(events.RunStarted)}) started
        left join ({own_columns(events.RunFinished)}) finished using (run)
        left join (select run, arg_max(mode, at_us) as mode
                   from ({own_columns(events.ModeChanged)}) group by run) changed using (run)
        left join (select run, max(iteration) + 1 as iterations from log
                   where type = '{tag_of(events.IterationCommitted)}' group by run) committed using (run)
        left join (select run, max(at_us) as last_us from log group by run) last using (run)""",
    "devices": f"""
        select joined.run, joined.device, joined.rank, joined.node, joined.pid, joined.at_us as joined_us,
            case when lost.how is null then 'joined' else 'lost' end as state, lost.how, lost.detail, lost.detected_us,
            lost.at_us as lost_us
        from ({own_columns(events.DeviceJoined)}) joined
        left join ({own_columns(events.DeviceLost)}) lost using (run, rank)""",
    "faults": own_columns(events.FaultInjected),
    "predictors": own_columns(events.PredictorFitted),
    "verdicts": f"""
        select made.* exclude (until_iteration), coalesce(closed.until_iteration, made.until_iteration) as until_iteration,
            closed.reason as closed_reason, scored.correct as first_correct, scored.truth as first_truth,
            scored.delay_iterations as first_delay_iterations,
            scored.onset_error_iterations as first_onset_error_iterations, scored.speed_error as first_speed_error
        from (select * from ({own_columns(events.Verdict)})
              qualify row_number() over (partition by run, verdict order by seq desc) = 1) made
        left join ({own_columns(events.VerdictClosed)}) closed using (run, verdict)
        left join ({own_columns(events.VerdictScored)}) scored using (run, verdict)""",
    "decisions": " union all by name ".join(
        (
            _decision("approved", events.PlanApproved, by='"by"'),
            _decision("rejected", events.PlanRejected, by='"by"'),
            _decision("expired", events.PlanExpired),
            _decision("applied", events.PlanApplied, epoch="epoch"),
            _decision("failed", events.PlanFailed, epoch="epoch"),
            _decision("scored", events.PlanScored, epoch="epoch", reason="void"),
        )
    ),
    "proposals": f"""
        select made.*, coalesce(decided.status, 'open') as status, decided."by" as decided_by,
            decided.reason as decision_reason, decided.at_us as decided_us
        from ({own_columns(events.PlanProposed)}) made
        left join (
            select run, proposal, arg_max(decision, seq) as status, max(at_us) as at_us,
                coalesce(arg_max("by", seq) filter (decision != 'applied'), arg_max("by", seq)) as "by",
                coalesce(arg_max(reason, seq) filter (decision != 'applied'), arg_max(reason, seq)) as reason
            from decisions where decision != 'scored'
            group by run, proposal) decided using (run, proposal)""",
    "plans": f"""
        select applied.run, applied.epoch, applied.digest, applied.proposal, applied.iteration as from_iteration,
            applied.reason, applied.at_us, scored.predicted_s, scored.baseline_s, scored.measured_s, scored.effect_s,
            scored.interval_s, scored.n, scored.void, applied.plan
        from ({own_columns(events.PlanApplied)}) applied
        left join ({own_columns(events.PlanScored)}) scored using (run, epoch)""",
}
"""Name -> query, in an order in which each stands only on earlier ones."""

EXECUTED = """
    create or replace macro executed(of_run) as table
    with counted as (select iteration, epoch, attempt from iterations where run = of_run),
    done as (
        select iteration, kind, micro_batch, unnest(range(first_layer, first_layer + n_layers)) as layer
        from chunks join counted using (iteration, epoch, attempt) where run = of_run),
    due as (
        select iteration, unnest(['F', 'B']) as kind, layers.range::integer as layer,
            batches.range::integer as micro_batch
        from counted join plans using (epoch), range((plan->>'n_layers')::bigint) layers,
            range(json_array_length(plan->'routes')::bigint) batches
        where run = of_run)
    select iteration, kind, layer, micro_batch, count(done.iteration) as times
    from (select distinct iteration, kind, layer, micro_batch from due
          union select iteration, kind, layer, micro_batch from done) cells
    left join done using (iteration, kind, layer, micro_batch)
    group by iteration, kind, layer, micro_batch
"""
"""`select * from executed('<run>')`: how often each (layer, micro_batch) was executed per committed iteration, in the attempt
that counted, for F and B each. A run is right when every `times` is 1; 0 stands where the plan in force asks for more."""


def create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Define all views and `executed` over the relation `log`, which must exist."""
    for name, query in VIEWS.items():
        connection.execute(f"create or replace view {name} as {query}").fetchall()
    connection.execute(EXECUTED).fetchall()
