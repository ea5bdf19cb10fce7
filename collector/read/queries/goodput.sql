-- How much of a run's time went into iterations that counted, and how many tokens came of it. Of simulated and imported
-- runs, time is the run's own clock, from the first iteration's start to the last one's end; a clock that starts anew in each
-- step tells none.
with counted as (
    select run, count(*) as n_iterations, sum(tokens)::bigint as tokens, sum(iteration_us) / 1e6 as counted_s
    from iterations
    group by run
),
own_clock as (
    select run, max(end_us) - min(start_us) as elapsed_us
    from iterations
    where run in (select run from runs where clock in ('virtual', 'imported'))
    group by run
),
timed as (
    select run, status, started_us,
        case
            when clock not in ('virtual', 'imported') then coalesce(finished_us, last_us) - started_us
            when own_clock.elapsed_us >= 0.99e6 * counted_s then own_clock.elapsed_us
        end / 1e6 as elapsed_s
    from runs
    left join own_clock using (run)
    left join counted using (run)
)
select run, status, n_iterations, tokens, round(elapsed_s, 1) as elapsed_s, round(counted_s, 1) as counted_s,
    round(100 * counted_s / nullif(elapsed_s, 0), 1) as counted_percent, round(tokens / nullif(elapsed_s, 0), 1) as tokens_per_s
from timed
join counted using (run)
order by started_us desc
