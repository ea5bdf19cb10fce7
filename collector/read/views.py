"""The SQL views, the same for a reader, in the database and in the console.

Telemetry comes from `log` (rows.py), everything that is a projection from `projected.<name>` (projections/definitions.py), and
control events from the projection that holds them all. Columns of an event's own are derived from its struct, with its
defaults: a field added there appears here. Times `*_us` are microseconds: `at_us`, `started_us`, `finished_us`, `last_us` wall
clock, `start_us` and `posted_us` the run's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from unskew.collector import events
from unskew.collector.events import Control, Event
from unskew.collector.files import columns, rows
from unskew.collector.files.upcasters import rows_of
from unskew.collector.projections.definitions import PROJECTIONS
from unskew.collector.read.outcomes import outcomes
from unskew.collector.read.skew import SKEW

if TYPE_CHECKING:
    import duckdb


def own_columns(event: type[Event]) -> str:
    """`columns.own_columns` from where the event's class is kept, named as in Python."""
    own = columns.own_columns(event, "projected.control" if issubclass(event, Control) else "log")
    renamed = [field for field in msgspec.structs.fields(event) if field.name != field.encode_name]
    names = ", ".join(f"{field.encode_name} as {field.name}" for field in renamed)
    return f"select * rename ({names}) from ({own})" if renamed else own


def events_of(source: str) -> str:
    """Every event of a relation with the columns of the log, its line as JSON."""
    return (
        "select run, pos, writer, seq, at_us, stream, version, actor, type, iteration, rank, "
        f"({rows.PAYLOAD})::json as payload from {source}"
    )


def _decision(
    decision: str, event: type[Event], *, by: str = "actor", reason: str = "reason", plan_version: str = "null"
) -> str:
    return (
        f"select run, at_us, proposal, '{decision}' as decision, {by} as \"by\", {reason} as reason, "
        f"{plan_version}::bigint as plan_version, seq from ({own_columns(event)})"
    )


_SPAN = "run, device, rank, plan_version, attempt, iteration, micro_batch, kind, start_us, wall_us"
_WAITS = "compute_us, wait_tp_us, wait_dp_us, wait_pp_us, runq_us"

VIEWS: dict[str, str] = {
    "events": events_of("log"),
    "spans": f"""
        select {_SPAN}, first_layer, n_layers, "group", group_seq, peer, bytes, posted_us, {_WAITS}, writer, seq, at_us
        from (select * rename (epoch as plan_version) from ({rows_of(events.Span, "log")}))""",
    "chunks": f"select {_SPAN}, first_layer, n_layers, {_WAITS} from spans where kind in {events.CHUNK_KINDS}",
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
    "gradients_kept": own_columns(events.GradientsKept),
    "quorums": own_columns(events.QuorumFormed),
    "replica_steps": own_columns(events.ReplicaStep),
    "heartbeats": own_columns(events.Heartbeat),
    "judged": """
        select *, healthy_us as predicted_us
        from (select * rename (epoch as plan_version, predicted_us as healthy_us) from projected.judged)""",
    "iterations": """
        select run, iteration, epoch as plan_version, attempt, loss, tokens, iteration_us, n_ranks, log_complete, predicted_us,
            start_us, end_us
        from projected.iterations where n_ranks > 0""",
    "rollups": "select * from projected.rollups",
    "writers": "select * from projected.writers",
    "host_clocks": own_columns(events.HostClock),
    "recorded_operations": own_columns(events.OperationsRecorded),
    "recorded_collectives": own_columns(events.CollectiveRecorded),
    "recorded_sources": own_columns(events.SourceRecorded),
    "recorded_groups": own_columns(events.GroupRecorded),
    "runs": f"""
        select started.run, started.device, started.clock, coalesce(changed.mode, started.mode) as mode, started.ranks,
            coalesce(finished.status, 'unfinished') as status, finished.reason,
            coalesce(finished.iterations, counted.iterations, 0) as iterations, started.at_us as started_us,
            finished.at_us as finished_us, written.last_us, written.n_events, written.n_dropped, started.version, started.code,
            started.options, coalesce(started.device_kind, case
                when started.device ^@ 'sleep' then 'sleep' when started.device ^@ 'virtual' then 'virtual'
                when started.device ^@ 'real' and contains(started.device, 'GPU') then 'gpus'
                when started.device ^@ 'real' then 'cores' end) as device_kind
        from ({own_columns(events.RunStarted)}) started
        left join ({own_columns(events.RunFinished)}) finished using (run)
        left join (select run, arg_max(mode, at_us) as mode
                   from ({own_columns(events.ModeChanged)}) group by run) changed using (run)
        left join (select run, max(iteration) + 1 as iterations from iterations group by run) counted using (run)
        left join (select run, max(last_us) as last_us, sum(n_events)::bigint as n_events, sum(n_dropped)::bigint as n_dropped
                   from writers group by run) written using (run)""",
    "devices": f"""
        select joined.run, joined.device, joined.rank, joined.node, joined.pid, joined.at_us as joined_us,
            case when lost.seq > joined.seq then 'lost' else 'joined' end as state, lost.how, lost.detail, lost.detected_us,
            lost.at_us as lost_us, coalesce(lost.n_losses, 0) as n_losses
        from (select * from ({own_columns(events.DeviceJoined)})
              qualify row_number() over (partition by run, rank order by seq desc) = 1) joined
        left join (select *, count(*) over (partition by run, rank) as n_losses from ({own_columns(events.DeviceLost)})
                   qualify row_number() over (partition by run, rank order by seq desc) = 1) lost using (run, rank)""",
    "faults": own_columns(events.FaultInjected),
    "diagnoses": own_columns(events.Diagnosed),
    "predictors": own_columns(events.PredictorFitted),
    "verdicts": f"""
        select made.* exclude (until_iteration), coalesce(closed.until_iteration, made.until_iteration) as until_iteration,
            closed.reason as closed_reason, scored.correct as first_correct, scored.truth as first_truth,
            scored.delay_iterations as first_delay_iterations,
            scored.onset_error_iterations as first_onset_error_iterations, scored.speed_error as first_speed_error
        from (select * replace (first_value(since_iteration) over (partition by run, verdict order by seq) as since_iteration)
              from ({own_columns(events.Verdict)})
              qualify row_number() over (partition by run, verdict order by seq desc) = 1) made
        left join ({own_columns(events.VerdictClosed)}) closed using (run, verdict)
        left join ({own_columns(events.VerdictScored)}) scored using (run, verdict)""",
    "decisions": " union all by name ".join(
        (
            _decision("approved", events.PlanApproved, by='"by"'),
            _decision("rejected", events.PlanRejected, by='"by"'),
            _decision("expired", events.PlanExpired),
            _decision("applied", events.PlanApplied, plan_version="plan_version"),
            _decision("failed", events.PlanFailed, plan_version="plan_version"),
            _decision("scored", events.PlanScored, plan_version="plan_version", reason="void"),
        )
    ),
    "proposals": f"""
        select made.*, coalesce(decided.status, 'open') as status, decided."by" as decided_by,
            decided.reason as decision_reason, decided.at_us as decided_us,
            made.optional and decided.status is null and going_on.run is not null
                and (going_on.mode = 'approve' or (going_on.mode = 'auto' and coalesce(refused.by_auto, false))) as waits
        from ({own_columns(events.PlanProposed)}) made
        left join (select run, coalesce(changed.mode, started.mode) as mode
                   from ({own_columns(events.RunStarted)}) started
                   left join (select run, arg_max(mode, seq) as mode
                              from ({own_columns(events.ModeChanged)}) group by run) changed using (run)
                   anti join ({own_columns(events.RunFinished)}) finished using (run)) going_on using (run)
        left join (select run, regexp_extract(command, '[^ ]*$') as proposal, bool_or("by" = 'auto') as by_auto
                   from ({own_columns(events.CommandRefused)}) group by run, proposal) refused using (run, proposal)
        left join (
            select run, proposal, arg_max(decision, seq) as status, max(at_us) as at_us,
                coalesce(arg_max("by", seq) filter (decision != 'applied'), arg_max("by", seq)) as "by",
                coalesce(arg_max(reason, seq) filter (decision != 'applied'), arg_max(reason, seq)) as reason
            from decisions where decision != 'scored'
            group by run, proposal) decided using (run, proposal)""",
    "plans": f"""
        select applied.run, applied.plan_version, applied.digest, applied.proposal, applied.iteration as from_iteration,
            applied.reason, applied.at_us, scored.predicted_s, scored.baseline_s, scored.measured_s, scored.effect_s,
            scored.interval_s, scored.n, scored.void, applied.plan
        from ({own_columns(events.PlanApplied)}) applied
        left join ({own_columns(events.PlanScored)}) scored using (run, plan_version)""",
    "alert_deliveries": own_columns(events.AlertDelivered),
    "alerts": f"""
        select opened.run, opened.alert, opened.rule, opened.subject, opened.text, opened.at_us as opened_us,
            closed.at_us as closed_us, closed.reason as closed_reason, coalesce(delivered.n_failed, 0) as n_failed
        from ({own_columns(events.AlertOpened)}) opened
        left join ({own_columns(events.AlertClosed)}) closed using (run, alert)
        left join (select run, alert, count(*) filter (not ok) as n_failed from alert_deliveries group by run, alert)
            delivered using (run, alert)""",
    "flagged": """
        select run, device, rank, verdict, cause, speed, confidence, at_us, since_iteration, until_iteration, closed_reason,
            first_correct, sentence
        from (select *, (party->>'rank')::bigint as rank
              from (select *, unnest(culprits::json[]) as party from verdicts) where party->>'kind' = 'device') named
        left join devices using (run, rank)""",
    "detection_limits": own_columns(events.DetectionLimit),
    "outcomes": outcomes(own_columns),
    "detection": """
        select runs.run, coalesce(given.n_verdicts, 0) as n_verdicts, coalesce(given.n_correct, 0) as n_correct,
            coalesce(given.n_false, 0) as n_false,
            given.n_correct / nullif(given.n_correct + given.n_false, 0) as "precision", coalesce(due.n_faults, 0) as n_faults,
            coalesce(due.n_found, 0) as n_found, due.n_found / nullif(due.n_faults, 0) as recall, given.median_delay_iterations
        from runs
        left join (select run, count(*) as n_verdicts, count(*) filter (first_correct) as n_correct,
                       count(*) filter (not first_correct) as n_false,
                       median(first_delay_iterations) as median_delay_iterations
                   from verdicts group by run) given using (run)
        left join (select faults.run, count(*) as n_faults,
                       count(*) filter (exists (
                           select 1 from flagged
                           where flagged.run = faults.run and flagged.rank = faults.rank and flagged.first_correct
                               and flagged.cause = case faults.kind when 'slow' then 'slow_device' when 'kill' then 'dead'
                                   else 'hung' end)) as n_found
                   from faults group by faults.run) due using (run)""",
    "health": """
        select devices.run, devices.rank, devices.device, devices.node, devices.state,
            case when devices.state = 'lost' then devices.how end as how, beat.activity,
            beat.iteration, beat.age_us, beat.stalled_us, beat.waits_for, beat.at_us as heartbeat_us, seen.last_us,
            seen.last_iteration, named.verdict, named.cause, named.speed, named.since_iteration
        from devices
        left join projected.heartbeats beat using (run, rank)
        left join (select run, rank, max(last_us) as last_us, max(last_iteration) as last_iteration
                   from writers where rank is not null group by run, rank) seen using (run, rank)
        left join (select * from flagged where until_iteration is null
                   qualify row_number() over (partition by run, rank order by verdict desc) = 1) named using (run, rank)""",
    "device_history": """
        select device, count(distinct run) as n_runs,
            count(distinct run) filter (n_losses > 0 or n_verdicts > 0) as n_runs_affected,
            sum(n_losses)::bigint as n_losses, coalesce(sum(n_verdicts), 0)::bigint as n_verdicts,
            list_sort(list_distinct(flatten(list(causes) filter (causes is not null)))) as causes, min(slowest) as slowest,
            min(joined_us) as first_us, max(coalesce(trouble_us, lost_us)) as last_trouble_us,
            arg_max(run, joined_us) as last_run
        from devices
        left join (select run, rank, count(*) as n_verdicts, list(cause) as causes, max(at_us) as trouble_us,
                       min(list_min(list_transform(json_keys(speed), lambda kind: (speed->>kind)::double))) as slowest
                   from flagged group by run, rank) using (run, rank)
        group by device""",
    "skew": SKEW,
}
"""Name -> query, in an order in which each builds only on earlier ones."""

for _name in (
    "spans", "chunks", "transfers", "collectives", "judged", "iterations", "decisions", "proposals", "plans",
    "gradients_kept", "quorums", "replica_steps",
):  # fmt: skip
    VIEWS[_name] = f"select *, plan_version as epoch from ({VIEWS[_name]})"
VIEWS["accused"] = "select * from flagged"  # former names: people's queries go on working

EXECUTED = """
    create or replace macro executed(of_run) as table
    with counted as (
        select iteration, plan_version, attempt from iterations
        where run = (select case when count(*) > 0 then of_run else error('there is no run ' || of_run) end
                     from writers where run = of_run)),
    kept as (
        select iteration, of_plan_version as plan_version, micro_batch,
            unnest(range(first_layer, first_layer + n_layers)) as layer
        from (select * exclude (micro_batches), unnest(micro_batches::bigint[]) as micro_batch
              from gradients_kept join counted using (iteration, plan_version, attempt) where run = of_run)),
    executions as (  -- what a group executes together is one, when all its members have
        select iteration, plan_version, attempt, kind, micro_batch, layer,
            case when count(distinct rank) < max(members) then 0 else ceil(count(*) / max(members))::bigint end as times
        from (select *, coalesce(length("group") - length(replace("group", '-', '')), 0) + 1 as members,
                  unnest(range(first_layer, first_layer + n_layers)) as layer
              from spans where run = of_run and kind in ('F', 'B', 'W'))
        group by all),
    done as (
        select iteration, kind, micro_batch, layer, times
        from executions semi join counted using (iteration, plan_version, attempt)
            anti join kept using (iteration, micro_batch, layer)
        union all
        select iteration, kind, micro_batch, layer, times
        from executions semi join kept using (iteration, plan_version, micro_batch, layer)),
    due as (
        select iteration, layers.range::integer as layer, batches.range::integer as micro_batch,
            unnest(case when plan->>'schedule' in ('zb-h1', 'zb-v', 'searched') then ['F', 'B', 'W'] else ['F', 'B'] end)
                as kind
        from counted join plans using (plan_version), range((plan->>'n_layers')::bigint) layers,
            range(json_array_length(plan->'routes')::bigint) batches
        where run = of_run)
    select iteration, kind, layer, micro_batch, coalesce(sum(done.times), 0)::bigint as times
    from (select distinct iteration, kind, layer, micro_batch from due
          union select iteration, kind, layer, micro_batch from done) cells
    left join done using (iteration, kind, layer, micro_batch)
    group by iteration, kind, layer, micro_batch
"""
"""`select * from executed('<run>')`: how often each (layer, micro_batch) was executed per committed iteration, in the attempt
that counted, for F, B and, where the plan's schedule splits the backward pass, W each; where that attempt kept gradients of an
earlier one, in the attempt that they are of. A run is right when every `times` is 1;
It is 0 where the plan in force asks for more. A run that the log does not have is an error: no rows would be a proof of it."""


def create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Define all views and `executed` over the relation `log`, which must exist; every projection is made of it, each time."""
    project(connection, {}, "log")
    for name in VIEWS:
        connection.execute(view(name)).fetchall()
    connection.execute(EXECUTED).fetchall()


def view(name: str) -> str:
    """The statement that defines a view."""
    return f"create or replace view {name} as {VIEWS[name]}"


def project(connection: duckdb.DuckDBPyConnection, published: Mapping[str, str], rest: str) -> None:
    """Define the projections again: `published` (name -> SELECT of its published rows) and what the relation `rest` adds.

    `rest` holds exactly the rows of `log` that are not in the published ones.
    """
    connection.execute("create schema if not exists projected").fetchall()
    for name in PROJECTIONS:
        connection.execute(projection_view(name, published, rest)).fetchall()


def projection_view(name: str, published: Mapping[str, str], rest: str) -> str:
    """The statement that defines a projection."""
    projection = PROJECTIONS[name]
    rows = projection.partial(rest)
    if name in published:
        rows = f"{published[name]} union all by name {rows}"
    return f"create or replace view projected.{name} as {projection.merge(f'({rows})')}"
