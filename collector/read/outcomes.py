"""The view `outcomes`: what the control events of a run amount to, in SQL.

`outcome_of_run` (analytics/core/outcome.py) says the same of a folded run, to the letter: its words for what nobody has judged
are the same constants, and tests/analytics/core/test_outcome.py holds every answer of the one against that of the other.
"""

from __future__ import annotations

from collections.abc import Callable

from unskew.collector.events import (
    MOST_SLOWDOWN,
    OF_DEVICES,
    DeviceLost,
    Event,
    PlanApplied,
    PlanProposed,
    RunFinished,
    RunStarted,
    Verdict,
    VerdictClosed,
)
from unskew.collector.outcome_words import (
    HIDDEN,
    MOST_STATED,
    NO_END,
    NONE_SLOWER,
    NOT_IMPORTED,
    NOTHING,
    OLD_DIAGNOSIS,
    SIMULATED,
    TOO_SHORT,
    WARM_UP,
)

HELD = "held_runs"
"""The variable of a connection with the runs that a living controller holds: that is not in the log, and where a file is read
without us nobody knows it."""
SET_HELD = f"set variable {HELD} = ?::varchar[]"
_HELD = f"coalesce(list_contains(getvariable('{HELD}')::varchar[], runs.run), false)"
_MISSING = "format('the log holds {} of the {} iterations that were committed', iterations, committed)"
_UNWRITTEN = "format('{:,} events could not be written', unwritten)"
_PERCENT = "format('{:.3g} %', 100 * (smallest_slowdown - 1))"
_NONE_SLOWER = "'" + NONE_SLOWER.format("' || format('{:.3g} %', 100 * (none_slower - 1)) || '") + "'"
_SEEN = f"'a lasting slowdown of any device by ' || {_PERCENT} || ' or more would have been named'"


def _text(words: str) -> str:
    return "'" + words.replace("'", "''") + "'"


def outcomes(rows: Callable[[type[Event]], str]) -> str:
    """The query, over the views `runs`, `verdicts`, `proposals`, `flagged`, `devices`, `diagnoses` and `detection_limits`, and
    `rows` of single events. Of open verdicts the first is the one whose proposal waits for a person, then come those that no
    plan answers (`RunState.by_urgency`). What is needed more than once is made once: the planner, which takes
    nearly all of the time, else sees it as often."""
    return f"""
        with all_runs as materialized (
            select run, status, reason, clock, device, finished_us, n_dropped from runs),
        back as (
            select run, verdict from flagged join devices using (run, rank)
            left join (select run, rank, max(seq) as seq from ({rows(DeviceLost)}) group by run, rank) lost using (run, rank)
            left join (select run, rank, max(seq) as seq from (
                    select run, seq, unnest(json_extract(plan, '$.roles[*].rank')::bigint[]) as rank
                    from ({rows(PlanApplied)}) semi join ({rows(DeviceLost)}) using (run))
                group by run, rank) given_a_role using (run, rank)
            where cause = 'dead' group by run, verdict
            having bool_and(state = 'joined' or coalesce(given_a_role.seq > lost.seq, false))),
        asking as materialized (select run, proposal from proposals where waits),
        answers as materialized (
            select made.run, made.proposal, given.verdict
            from ({rows(PlanProposed)}) made
            join (select run, verdict, arg_max(cause, seq) as cause, min(seq) as seq from ({rows(Verdict)})
                group by run, verdict) given using (run)
            left join ({rows(VerdictClosed)}) closed on closed.run = given.run and closed.verdict = given.verdict
            where made.verdict = given.verdict or (made.optional and given.cause in {OF_DEVICES}
                and given.seq < made.seq and coalesce(closed.seq > made.seq, true))),
        answered as (select distinct run, verdict, 1 as plan from answers
            semi join ({rows(PlanApplied)}) applied using (run, proposal)),
        waiting as (select distinct run, answers.verdict, 1 as asked from answers
            semi join asking using (run, proposal)),
        standing as (
            select named.run, count(*) as n, count(*) filter (is_open) as n_open, first(
                regexp_replace(sentence, '[.]$', '') || coalesce(', until iteration ' || until_iteration, '')
                order by is_open desc, case when is_open then asked end nulls last, case when is_open then plan end nulls first,
                    named.seq desc) as newest
            from (select verdicts.*, until_iteration is null and back.run is null as is_open
                  from verdicts left join back using (run, verdict)) named
                left join answered using (run, verdict) left join waiting using (run, verdict)
                left join (select run, true as is_over from ({rows(RunFinished)})) finished using (run)
            where is_open or is_over
            group by named.run),
        given as (select run, count(*) as n from verdicts group by run),
        diagnosed as (
            select * from (select * from diagnoses qualify row_number() over (partition by run order by seq desc) = 1) newest
            semi join all_runs runs on newest.run = runs.run and runs.finished_us is not null
                and (newest.status = runs.status or (newest.status = '' and newest.outcome != 'well'))),
        ended as (
            select finished.run, finished.status, finished.reason, finished.iterations, finished.unwritten,
                coalesce(committed, case when finished.status = 'done' and started.device_kind is not null
                    then (started.options->>'iterations')::bigint end) as committed
            from ({rows(RunFinished)}) finished join ({rows(RunStarted)}) started using (run)),
        gaps as (
            select run, coalesce(
                nullif(concat_ws(', ', case when committed > iterations then {_MISSING} end,
                    case when unwritten > 0 then {_UNWRITTEN} end), ''),
                case when status = 'incomplete' then nullif(reason, '') end) as gap
            from ended
            union all
            select run, {_text(NO_END)} from all_runs runs
            where finished_us is null and not {_HELD}),
        sight as (
            select runs.run, newest.smallest_slowdown as smallest_slowdown, newest.of_devices as of_devices,
                case when newest.run is not null then nullif(newest.why, '')
                    when runs.clock = 'imported' then {_text(NOT_IMPORTED)}
                    when runs.device = 'simulated' then {_text(SIMULATED)}
                    when runs.finished_us is not null or not {_HELD} then {_text(TOO_SHORT)}
                    else {_text(WARM_UP)} end as bound,
                {_SEEN} as seen,
                case when smallest_slowdown is null then coalesce(bound, {_text(NOTHING)})
                    when smallest_slowdown > {MOST_STATED} then concat_ws('; ', {_text(HIDDEN.format("any device"))}, bound)
                    when smallest_slowdown > {MOST_SLOWDOWN} then concat_ws('; ', 'only ' || seen, bound) end as blindness
            from all_runs runs left join (select * from detection_limits
                qualify row_number() over (partition by run order by seq desc) = 1) newest using (run)),
        parts as (
            select runs.run, diagnosed.run is not null as was_diagnosed, diagnosed.why as diagnosis, gaps.gap,
                case when gap is null and not was_diagnosed then sight.of_devices end as none_slower,
                coalesce({_NONE_SLOWER}, '') || sight.blindness as blindness,
                coalesce(nullif(diagnosed.outcome, ''),
                    case when json_array_length(diagnosed.verdicts) > 0 then 'wrong' else 'cannot_be_judged' end) as found,
                json_extract_string(diagnosed.verdicts, '$[0].sentence') as first_found,
                case when was_diagnosed then diagnosed.smallest_slowdown
                    when sight.smallest_slowdown <= {MOST_SLOWDOWN} then sight.smallest_slowdown
                    else sight.of_devices end as smallest_slowdown,
                concat_ws('; ', sight.seen, sight.bound) as in_sight, standing.newest,
                case when standing.n > 1
                    then (standing.n - 1) || ' more verdict' || case when standing.n > 2 then 's' else '' end end as more,
                case when runs.status = 'failed'
                    then 'the run failed: ' || coalesce(nullif(runs.reason, ''), 'no reason given') end as failure,
                case when runs.n_dropped > 0 then format('{{:,}} event{{}} dropped unwritten', runs.n_dropped,
                    case when runs.n_dropped = 1 then ' was' else 's were' end) end as lacking,
                given.n || ' verdict' || case when given.n > 1 then 's' else '' end || ' before, no longer open' as earlier,
                coalesce(given.n, 0) as n_verdicts, coalesce(standing.n_open, 0) as n_open,
                asking.proposal as waits
            from all_runs runs left join (select run, min(proposal) as proposal from asking group by run) asking using (run)
                left join diagnosed using (run) left join standing using (run) left join given using (run)
                left join gaps using (run) left join sight using (run)),
        judged_as as (
            select *, case when was_diagnosed then found when newest is not null or failure is not null then 'wrong'
                when gap is not null or blindness is not null then 'cannot_be_judged' else 'well' end as word
            from parts)
        select run, word as outcome,
            case when word = 'cannot_be_judged' and not was_diagnosed then none_slower else smallest_slowdown end
                as smallest_slowdown,
            case when was_diagnosed then coalesce(nullif(diagnosis, ''), case when word = 'wrong' then first_found end,
                    {_text(OLD_DIAGNOSIS)})
                when word = 'wrong' then concat_ws('; ', newest, more, failure, gap, lacking)
                when word = 'cannot_be_judged' then concat_ws('; ', gap, blindness, lacking)
                else concat_ws('; ', in_sight, lacking, earlier) end as why, n_verdicts, n_open, waits
        from judged_as"""
