-- What went wrong and what it cost: device-seconds that iterations took beyond the run's median, by the verdict open at the time.
-- An iteration under several verdicts is shared between them; what no verdict explains stands as unexplained.
with usual as (
    select run, median(iteration_us) as usual_us from iterations
    where not exists (
        from verdicts where verdicts.run = iterations.run and since_iteration <= iteration
            and iteration < coalesce(until_iteration, 2147483647))
    group by run
),
lost as (
    select run, iteration, (iteration_us - usual_us) * n_ranks / 1e6 as lost_s
    from iterations join usual using (run) where iteration_us > usual_us
),
explained as (
    select lost.run, lost.iteration, cause, lost_s / count(*) over (partition by lost.run, lost.iteration) as lost_s
    from lost join verdicts on lost.run = verdicts.run and lost.iteration >= since_iteration
        and lost.iteration < coalesce(until_iteration, 2147483647)
)
select run, cause, round(sum(lost_s), 3) as lost_s, count(distinct iteration) as n_iterations
from (from explained
      union all
      select run, iteration, 'unexplained', lost_s from lost anti join explained using (run, iteration))
group by run, cause
order by lost_s desc, run, cause
