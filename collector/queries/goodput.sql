-- How much of a run's time went into iterations that counted, and how many tokens came of it.
with counted as (
    select run, count(*) as n_iterations, sum(tokens)::bigint as tokens, sum(iteration_us) / 1e6 as counted_s from iterations group by run
)
select run, status, n_iterations, tokens, round((last_us - started_us) / 1e6, 1) as elapsed_s, round(counted_s, 1) as counted_s,
    round(100 * counted_s / nullif((last_us - started_us) / 1e6, 0), 1) as counted_percent,
    round(tokens / nullif((last_us - started_us) / 1e6, 0), 1) as tokens_per_s
from runs
join counted using (run)
where clock != 'imported'
order by started_us desc
