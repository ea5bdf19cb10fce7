"""The view `skew`: what devices that differ cost an iteration, by level, from the chunk times of its ranks.

A tensor-parallel group is as slow as its slowest member, a replica as its slowest stage, the iteration as its slowest replica.
With `own` the chunk time of a device, `group`, `replica` and `all` the largest of those around it, each device spends

    all = own + (group - own) + (replica - group) + (all - replica)

so device-time is split over the levels device, tp, pp and dp with nothing left over. The same of the times that healthy devices
would take is what no device is to blame for (an uneven plan, lengths); what is spent beyond it is lost. Over the loss of the
level `device` the losses are ResiHP's Figure 2. Bubbles, messages and the optimizer are in none of them.

Healthy is what was predicted, as in the view `judged`. Of a run of which nobody judged an iteration it is the fastest device's
time: then unequal stages are skew, too. Places are those of the plans, or of an import whose source states them.
"""

from __future__ import annotations

_WINDOWS = """window of_group as (partition by run, iteration, replica, stage),
            of_replica as (partition by run, iteration, replica), of_all as (partition by run, iteration)"""

SKEW = f"""
    with unjudged as (
        select run from (select run from writers group by run) every
        left join (select run, count(*) as n from judged where healthy_us > 0 group by run) known using (run)
        where n is null),
    measured as (
        select run, iteration, plan_version, rank, null::bigint as replica, null::bigint as stage, measured_us as own_us,
            healthy_us
        from judged where healthy_us > 0 and measured_us > 0
        union all
        select run, iteration, chunks.plan_version, rank, any_value(recorded.replica), any_value(recorded.stage),
            sum(compute_us)::bigint, null::bigint
        from chunks join unjudged using (run)
        left join (select run, iteration, rank, replica, stage from recorded_operations) recorded using (run, iteration, rank)
        join (select run, iteration, plan_version, attempt from iterations) counted
            using (run, iteration, plan_version, attempt)
        group by all having count(compute_us) = count(*) and sum(compute_us) > 0),
    roles as (
        select run, plan_version, (role->>'rank')::bigint as rank, (role->>'replica')::bigint as replica,
            (role->>'stage')::bigint as stage
        from (select run, plan_version, unnest((plan->'roles')::json[]) as role from plans)),
    placed as (
        select run, iteration, rank, coalesce(roles.replica, measured.replica) as replica,
            coalesce(roles.stage, measured.stage) as stage, own_us, healthy_us is not null as predicted,
            coalesce(healthy_us, min(own_us) over (partition by run, iteration)) as healthy_us
        from measured left join roles using (run, plan_version, rank)
        where coalesce(roles.replica, measured.replica) is not null),
    held_up as (
        select *, max(own_us) over of_group as group_us, max(own_us) over of_replica as replica_us,
            max(own_us) over of_all as all_us, max(healthy_us) over of_group as healthy_group_us,
            max(healthy_us) over of_replica as healthy_replica_us, max(healthy_us) over of_all as healthy_all_us
        from placed
        {_WINDOWS}),
    compared as (
        select *, max(own_us / healthy_us) over of_group / min(own_us / healthy_us) over of_group as tp_ratio,
            max(group_us / healthy_group_us) over of_replica / min(group_us / healthy_group_us) over of_replica as pp_ratio,
            max(replica_us / healthy_replica_us) over of_all / min(replica_us / healthy_replica_us) over of_all as dp_ratio
        from held_up
        {_WINDOWS}),
    levels as (
        select run, iteration, count(*) as n_devices, arg_max(rank, own_us) as slowest, bool_and(predicted) as predicted,
            unnest([
            {{'level': 'device', 'split': true, 'ratio': max(own_us / healthy_us), 'spent_us': sum(own_us)::bigint,
             'lost_us': sum(own_us - healthy_us)::bigint}},
            {{'level': 'tp', 'split': count(*) > count(distinct (replica, stage)), 'ratio': max(tp_ratio),
             'spent_us': sum(group_us - own_us)::bigint,
             'lost_us': sum(group_us - own_us - healthy_group_us + healthy_us)::bigint}},
            {{'level': 'pp', 'split': count(distinct (replica, stage)) > count(distinct replica), 'ratio': max(pp_ratio),
             'spent_us': sum(replica_us - group_us)::bigint,
             'lost_us': sum(replica_us - group_us - healthy_replica_us + healthy_group_us)::bigint}},
            {{'level': 'dp', 'split': count(distinct replica) > 1, 'ratio': max(dp_ratio),
             'spent_us': sum(all_us - replica_us)::bigint,
             'lost_us': sum(all_us - replica_us - healthy_all_us + healthy_replica_us)::bigint}}], recursive := true)
        from compared group by run, iteration)
    select run, iteration, level, ratio, spent_us, lost_us, n_devices, slowest, predicted from levels where split"""
"""One row per iteration and level of a run that has it."""
