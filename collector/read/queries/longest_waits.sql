-- Which rank waited most for the others: milliseconds an iteration that each rank spent in collectives, and in waits amid its
-- own work, and the share of its time. One that waits much less than the others is the one that these wait for.
with waited as (
    select run, rank, sum(case when kind in ('all_reduce', 'reduce_scatter', 'all_gather') then wall_us
        else coalesce(wait_dp_us, 0) + coalesce(wait_tp_us, 0) + coalesce(wait_pp_us, 0) end) as us
    from rollups
    group by run, rank
),
took as (
    select run, sum(iteration_us) as us, count(*) as n from iterations group by run
)
select run, rank, round(waited.us / n / 1e3, 2) as waited_ms, round(100 * waited.us / took.us, 1) as of_time_percent,
    n as n_iterations
from waited
join took using (run)
order by run, waited_ms desc, rank
