-- What each change of plan saved: predicted and measured seconds per iteration, the saving with its 95 % interval, who decided.
select plans.run, plans.plan_version, plans.from_iteration, plans.proposal, decided_by,
    coalesce(proposals.change, plans.reason) as change,
    baseline_s, predicted_s, measured_s, effect_s as saved_s, (interval_s->>0)::double as at_least_s,
    (interval_s->>1)::double as at_most_s, n as n_iterations, void as not_scored_because,
    plans.plan_version as epoch
from plans
left join proposals using (run, proposal)
where plans.proposal != ''
order by plans.run, plans.plan_version
