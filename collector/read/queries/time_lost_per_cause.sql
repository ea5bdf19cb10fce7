-- What each cause cost, in device-seconds against the ideal, as `unskew diagnose` said last; unexplained is the rest.
-- A run with a dash was not diagnosed yet (unskew diagnose RUN), or its data do not tell.
with last as (
    select run, time_lost_s from diagnoses
    qualify row_number() over (partition by run order by seq desc) = 1
),
lost as (
    select run, cause, (time_lost_s->>cause)::double as lost_s
    from (select run, time_lost_s, unnest(json_keys(time_lost_s)) as cause from last)
)
select runs.run, cause, round(lost_s, 3) as lost_s
from runs left join lost using (run)
order by lost_s desc nulls last, run, cause
