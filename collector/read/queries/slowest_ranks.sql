-- Which ranks are slow: mean time over prediction of each rank in the last 50 judged iterations of each run, worst first.
with recent as (
    select judged.*
    from judged
    join (select run, max(iteration) as newest from judged group by run) last using (run)
    where iteration > newest - 50 and healthy_us > 0
)
select run, rank, device, round(sum(measured_us) / sum(healthy_us), 3) as slowdown, round(avg(f), 3) as f, round(avg(b), 3) as b,
    round(avg(w), 3) as w, count(*) as n_iterations
from recent
left join devices using (run, rank)
group by run, rank, device
order by slowdown desc, run, rank
