"""Plan + batches + cost model + speeds -> predicted iteration time.

A chunk takes ``(n_layers x layer + head) / speed`` (core/cost.py; with the forward's where it recomputes), that of a
tensor-parallel group as long as its slowest member and then the group's sums (shards/together.py); the pipeline model lays the
chunks out; an iteration lasts until the last rank is done, where links cost also with its gradients (gradient_sync.py), plus
the constant end of an iteration (vote, optimiser, and gradients where their sums cost nothing by themselves).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from statistics import fmean

import msgspec
import numpy as np

from unskew.analytics.core.cost import HEALTHY, CostModel, Place, Speeds, speed_of
from unskew.analytics.core.plan import Plan, splits_backward
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.actions import Action
from unskew.analytics.pipeline.dag import Array, Messages
from unskew.analytics.pipeline.evaluator import Cores, Timeline, evaluate
from unskew.analytics.pipeline.gradient_sync import Bucket, bucket_us, buckets_of, last_parts, through
from unskew.analytics.pipeline.schedule import Schedule, build_schedule
from unskew.analytics.shards.crossings import shares
from unskew.analytics.shards.together import steps_of_sum, sums_in


class Prediction(msgspec.Struct, frozen=True):
    """`iteration_us` = `synced_us` + the iteration's end; `synced_us`: when the chunks of `timeline` are done, and the sums of
    gradients that are timed."""

    iteration_us: float
    timeline: Timeline
    synced_us: float


class LayerCosts(msgspec.Struct, frozen=True, dict=True):
    """Microseconds of one layer and of the head on a healthy device: per place (cost.py) and kind of work, [micro-batch,
    iteration].

    `tokens`, `sum_sq`: the work, [micro-batch, iteration].
    """

    cost: CostModel
    tokens: Array
    sum_sq: Array

    @cached_property
    def _found(self) -> dict[Place, tuple[dict[str, Array], dict[str, Array]]]:
        return {}

    def at(self, place: Place) -> tuple[dict[str, Array], dict[str, Array]]:
        """(of a layer, of the head) per kind of work."""
        if place not in self._found:
            costs = self.cost.costs_at(place)
            self._found[place] = (
                {kind: c.layer_us + c.token_us * self.tokens + c.token2_us * self.sum_sq for kind, c in costs.items()},
                {kind: c.head_us_per_token * self.tokens for kind, c in costs.items()},
            )
        return self._found[place]


def predict_iteration(plan: Plan, works: Sequence[Work], cost: CostModel, speeds: Speeds = HEALTHY) -> Prediction:
    """The predicted iteration in which micro-batch m carries `works[m]`; ranks and kinds not in `speeds` are healthy."""
    schedule = build_schedule(plan)
    costs = layer_costs([works], model_for(cost, plan.schedule))
    timeline = timeline_of(schedule, costs, speeds, iteration=0)
    synced = float(synced_us(timeline, costs, speeds).max())
    return Prediction(synced + cost.end_us(plan), timeline, synced)


def predict_iterations(plan: Plan, batches: Sequence[Sequence[Work]], cost: CostModel, speeds: Speeds = HEALTHY) -> Array:
    """The predicted times (us) of many iterations at once: [iteration]. `batches[k][m]` is micro-batch m of iteration k."""
    schedule = build_schedule(plan)
    costs = layer_costs(batches, model_for(cost, plan.schedule))
    timeline = timeline_of(schedule, costs, speeds)
    return synced_us(timeline, costs, speeds) + cost.end_us(plan)


def timeline_of(schedule: Schedule, costs: LayerCosts, speeds: Speeds, iteration: int | slice = slice(None)) -> Timeline:
    """The chunks of these iterations laid out, as their costs and messages let them: [action, iteration], or [action]."""
    spent_us = durations_us(schedule, costs, speeds)[:, iteration]
    return evaluate(schedule, spent_us, messages_of(schedule, costs, iteration), _cores_of(schedule, costs.cost, spent_us))


def _cores_of(schedule: Schedule, cost: CostModel, spent_us: Array) -> Cores | None:
    """What the chunks hold of the cores that are shared; of a tensor-parallel group in the mean over its members."""
    if cost.cores is None:
        return None
    teams = schedule.plan.teams
    together = [teams.get((action.micro_batch, action.first_layer), (action.rank,)) for action in schedule.order]
    working = np.array([fmean(1.0 - cost.idle.get(rank, 0.0) for rank in team) for team in together])
    held_us = working.reshape(-1, *[1] * (spent_us.ndim - 1)) * spent_us
    return Cores(cost.cores, held_us, np.array([len(team) for team in together]))


def synced_us(timeline: Timeline, costs: LayerCosts, speeds: Speeds) -> Array:
    """When the last chunk is done and the last bucket of gradients summed: [iteration]."""
    sync, schedule = costs.cost.sync, timeline.schedule
    if sync is None:
        return timeline.makespan_us
    buckets = buckets_of(schedule.plan, sync.layer_bytes, sync.bucket_bytes)
    ready = _ready_us(timeline, buckets, costs, speeds)
    ends = through(buckets, [{r: _latest(ready[r], one) for r in one.ranks} for one in buckets], partial(bucket_us, sync))
    return np.asarray(np.maximum.reduce([timeline.makespan_us, *(end for _, end in ends)]))


def _latest(ready: Mapping[int, Array], bucket: Bucket) -> Array | float:
    """When a rank has all that it adds to a bucket; a copy that executes nothing is there from the beginning."""
    times = [ready[layer] for layer in bucket.layers if layer in ready]
    return np.maximum.reduce(times) if times else 0.0


def _ready_us(timeline: Timeline, buckets: Sequence[Bucket], costs: LayerCosts, speeds: Speeds) -> dict[int, dict[int, Array]]:
    """Rank -> layer -> when the rank has added the last micro-batch to it: [iteration], or one number for a single one."""
    schedule = timeline.schedule
    at = {action.key: number for number, action in enumerate(schedule.order)}
    ending = [
        (rank, at[key], part)
        for rank, actions in schedule.by_rank.items()
        for key, parts in last_parts(actions, schedule.plan, buckets, rank).items()
        for part in parts
    ]
    order = schedule.order
    below = [msgspec.structs.replace(order[n], n_layers=part.first_layer - order[n].first_layer) for _, n, part in ending]
    left_us = durations_us(schedule, costs, speeds, below).reshape(len(ending), *timeline.end_us.shape[1:])
    ready: dict[int, dict[int, Array]] = {rank: {} for rank in schedule.plan.ranks}
    for (rank, number, part), left in zip(ending, left_us, strict=True):
        ready[rank].update(dict.fromkeys(part.closes, timeline.end_us[number] - left))
    return ready


def model_for(cost: CostModel, schedule: str) -> CostModel:
    """The cost model with B as a schedule of this name executes it: whole, or split into B and W."""
    return cost.split if splits_backward(schedule) else cost.joined


def layer_costs(batches: Sequence[Sequence[Work]], cost: CostModel) -> LayerCosts:
    """What the batches cost whatever the plan: computed once, used for every candidate plan of a schedule (`model_for`)."""
    tokens = np.array([[work.tokens for work in works] for works in batches], dtype=np.float64).T
    sum_sq = np.array([[work.sum_sq for work in works] for works in batches], dtype=np.float64).T
    return LayerCosts(cost, tokens, sum_sq)


def messages_of(schedule: Schedule, costs: LayerCosts, iteration: int | slice = slice(None)) -> Messages:
    """What the messages of `schedule.order` cost in these iterations: [action, iteration], or [action] in a single one."""
    cost, chunks = costs.cost, schedule.chunks
    if schedule.plan.teams:
        return _messages_of_groups(schedule, costs, iteration)
    latency_us: float | Array = cost.message_us
    if cost.slow_links:
        more_us = {(one.sender, one.receiver): one.more_us for one in cost.slow_links}
        links = zip(chunks.rank[chunks.given].tolist(), chunks.rank.tolist(), strict=True)
        latency_us = cost.message_us + np.array([more_us.get(link, 0.0) for link in links])
    link_us: float | Array = 0.0
    if cost.message_token_us:
        link_us = cost.message_token_us * costs.tokens[chunks.micro_batch, iteration]
    return Messages(latency_us, link_us, cost.blocking)


def _messages_of_groups(schedule: Schedule, costs: LayerCosts, iteration: int | slice) -> Messages:
    """The same between groups: of the messages that bring a tensor the largest and the slowest, and the gather behind them."""
    cost, chunks, team_of = costs.cost, schedule.chunks, schedule.plan.team_of
    more_us = {(one.sender, one.receiver): one.more_us for one in cost.slow_links}
    groups = [
        tuple(team_of.get(rank, (rank,)) for rank in link)
        for link in zip(chunks.rank[chunks.given].tolist(), chunks.rank.tolist(), strict=True)
    ]
    carried = {link: shares(*link) for link in {*groups}}
    largest = np.array([max(carried[link].values()) for link in groups])
    more = np.array([max((more_us.get(pair, 0.0) for pair in carried[link]), default=0.0) for link in groups])
    members = np.array([len(takers) for _, takers in groups])
    tokens = costs.tokens[chunks.micro_batch, iteration]
    further = (...,) + (None,) * (tokens.ndim - 1)
    gather_us = (members - 1)[further] * (cost.sum_us + cost.sum_token_us * tokens / members[further])
    link_us = cost.message_token_us * largest[further] * tokens
    return Messages((cost.message_us + more)[further] + gather_us, link_us, cost.blocking)


def durations_us(schedule: Schedule, costs: LayerCosts, speeds: Speeds, of: Sequence[Action] | None = None) -> Array:
    """Durations of the actions of `schedule.order`, or of some others that it has or that are the first layers of these:
    [action, iteration]. The costs must know the kinds that the schedule has (`model_for`). A TP group is as fast as its slowest
    member, each of which has its part of the work."""
    teams, actions = schedule.plan.teams, schedule.order if of is None else of
    if not teams:
        return _spent_us(schedule, [(action, action.rank, 1) for action in actions], costs, speeds)
    together = [teams.get((action.micro_batch, action.first_layer), (action.rank,)) for action in actions]
    each = [(a, rank, len(team)) for a, team in zip(actions, together, strict=True) for rank in team]
    first = np.cumsum([0, *map(len, together)])[:-1]
    weight = np.array([schedule.plan.weight_of.get(rank, 1.0) for _, rank, _ in each])[:, None]
    spent: Array = np.maximum.reduceat(weight * _spent_us(schedule, each, costs, speeds), first, axis=0)
    return spent + _sums_us(schedule, costs, actions, [len(team) for team in together])


def _sums_us(schedule: Schedule, costs: LayerCosts, actions: Sequence[Action], members: Sequence[int]) -> Array | float:
    """What the groups' sums take in each action: [action, iteration]."""
    cost, n_layers = costs.cost, schedule.plan.n_layers
    if not cost.sum_us and not cost.sum_token_us:
        return 0.0
    steps = np.array(
        [
            steps_of_sum(k)
            * sums_in(
                a.kind,
                a.n_layers,
                first=a.first_layer == 0,
                last=a.first_layer + a.n_layers == n_layers,
                again=schedule.plan.recomputes(a.rank, a.kind),
            )
            for a, k in zip(actions, members, strict=True)
        ]
    )
    part = costs.tokens[[action.micro_batch for action in actions]] / np.array(members)[:, None]
    return np.asarray(steps[:, None] * (cost.sum_us + cost.sum_token_us * part))


def _spent_us(schedule: Schedule, done: Sequence[tuple[Action, int, int]], costs: LayerCosts, speeds: Speeds) -> Array:
    """What each (action, one of those who execute it, how many they are) takes: [n, iteration]."""
    cost, plan = costs.cost, schedule.plan
    layers = np.array([plan.work_of(a.first_layer, a.n_layers) for a, _, _ in done], dtype=np.float64)[:, None]
    head = np.array([a.first_layer + a.n_layers == plan.n_layers for a, _, _ in done], dtype=np.float64)[:, None]
    speed = np.array([speed_of(speeds, rank, action.kind) for action, rank, _ in done])[:, None]
    kinds = list(cost.chunks)
    kind, micro_batch = np.array([(kinds.index(action.kind), action.micro_batch) for action, _, _ in done]).T
    number: dict[Place, int] = {}
    place = np.array([number.setdefault(cost.place_of(rank, tp), len(number)) for _, rank, tp in done])
    again = np.array([plan.recomputes(rank, action.kind) for action, rank, _ in done])

    def us(part: int) -> Array:
        of = np.stack([[costs.at(one)[part][name] for name in kinds] for one in number])
        spent: Array = of[place, kind, micro_batch]
        spent[again] += of[place, kinds.index("F"), micro_batch][again]
        return spent

    layer_us, head_us = us(0), us(1)
    return np.asarray((layers * layer_us + head * head_us) / speed)
