-- What iterations took beyond the run's median, in device-seconds, by the live verdict open at the time.
-- An iteration under several verdicts is shared between them; unexplained is what none was open in. What a cause cost against the
-- ideal is time_lost_per_cause.
with usual as (
    select run, median(iteration_us) as usual_us from iterations
    where not exists (
        from verdicts where verdicts.run = iterations.run and since_iteration <= iteration
            and iteration < coalesce(until_iteration, 2147483647))
    group by run
),
late as (
    select run, iteration, (iteration_us - usual_us) * n_ranks / 1e6 as over_s
    from iterations join usual using (run) where iteration_us > usual_us
),
explained as (
    select late.run, late.iteration, cause, over_s / count(*) over (partition by late.run, late.iteration) as over_s
    from late join verdicts on late.run = verdicts.run and late.iteration >= since_iteration
        and late.iteration < coalesce(until_iteration, 2147483647)
)
select run, cause, round(sum(over_s), 3) as over_usual_s, count(distinct iteration) as n_iterations
from (from explained
      union all
      select run, iteration, 'unexplained', over_s from late anti join explained using (run, iteration))
group by run, cause
order by over_usual_s desc, run, cause
