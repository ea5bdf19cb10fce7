-- What the log lacks: events that each writer had to discard because its buffer or the disk was full.
select run, writer, sum(n_dropped)::bigint as n_dropped, sum(n_events)::bigint as n_events,
    round(100 * sum(n_dropped) / (sum(n_dropped) + sum(n_events)), 3) as dropped_percent
from writers
group by run, writer
having sum(n_dropped) > 0
order by n_dropped desc
