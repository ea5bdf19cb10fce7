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
from unskew.analytics.core.plan import Plan, Route, splits_backward
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.actions import Action, action_of
from unskew.analytics.pipeline.dag import Array, Ints, Messages
from unskew.analytics.pipeline.gradient_sync import Bucket, bucket_us, buckets_of, last_steps, through
from unskew.analytics.pipeline.schedule import Schedule, Timeline, build_schedule, evaluate, pipeline_of
from unskew.analytics.pipeline.shared_cores import Cores
from unskew.analytics.shards.crossings import shares
from unskew.analytics.shards.together import norms_in, steps_of_sum, sums_in
from unskew.collector.events import CHUNK_KINDS


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
    team_of = schedule.plan.team_of
    together = [team_of.get(action.rank, (action.rank,)) for action in schedule.order]
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
    turns = [
        (rank, steps)
        for rank, actions in schedule.by_rank.items()
        for steps in last_steps(actions, schedule.plan, buckets, rank).values()
        if steps
    ]
    parts = [step.action for _, steps in turns for step in steps]
    spent_us = durations_us(schedule, costs, speeds, parts).reshape(len(parts), *timeline.end_us.shape[1:])
    ready: dict[int, dict[int, Array]] = {rank: {} for rank in schedule.plan.ranks}
    end = len(parts)
    for rank, steps in reversed(turns):
        done_us = timeline.end_us[max(at[step.action.key] for step in steps)]
        for number, step in zip(range(end - 1, -1, -1), reversed(steps), strict=False):
            ready[rank].update(dict.fromkeys(step.closes, done_us))
            done_us = done_us - spent_us[number]
        end -= len(steps)
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
    chunks = schedule.chunks
    return _messages(schedule.plan, costs, Deliveries(chunks.rank[chunks.given], chunks.rank, chunks.micro_batch), iteration)


class Deliveries(msgspec.Struct, frozen=True):
    """Who sends to whom, of which micro-batch: [message]."""

    senders: Ints
    receivers: Ints
    micro_batch: Ints


def _messages(plan: Plan, costs: LayerCosts, deliveries: Deliveries, iteration: int | slice) -> Messages:
    """What they cost in these iterations."""
    cost = costs.cost
    if plan.teams:
        return _messages_of_groups(plan, costs, deliveries, iteration)
    latency_us: float | Array = cost.message_us
    if cost.slow_links:
        more_us = {(one.sender, one.receiver): one.more_us for one in cost.slow_links}
        links = zip(deliveries.senders.tolist(), deliveries.receivers.tolist(), strict=True)
        latency_us = cost.message_us + np.array([more_us.get(link, 0.0) for link in links])
    link_us: float | Array = 0.0
    if cost.message_token_us:
        link_us = cost.message_token_us * costs.tokens[deliveries.micro_batch, iteration]
    return Messages(latency_us, link_us, cost.blocking)


def alike_finish_us(plan: Plan, route: Route, count: int, costs: LayerCosts, speeds: Speeds) -> Array:
    """[hop, iteration]: when each stage has done the last of `count` micro-batches that all cost what the first one does, in
    a pipeline of its own under 1F1B, whose micro-batches take this `route`. As the schedule of its plan would give it, but what
    chunks take is found once for each hop, and the graph is the same for all pipelines of a form."""
    pipeline, stages = pipeline_of("1f1b", ranks=len(route.hops), micro_batches=count), len(route.hops)
    actions = [action_of(route, kind, hop) for kind in CHUNK_KINDS[:2] for hop in range(stages)]
    own = [msgspec.structs.replace(action, micro_batch=0) for action in actions]
    each_us = _chunks_us(plan, own, costs, speeds)
    ranks = np.array([hop.rank for hop in route.hops], dtype=np.int64)
    senders = np.concatenate([ranks[:1], ranks[:-1], ranks[1:], ranks[-1:]])
    messages = _messages(plan, costs, Deliveries(senders, np.tile(ranks, 2), np.zeros(2 * stages, dtype=np.int64)), slice(None))
    of = pipeline.kind * stages + pipeline.hop
    latency_us, link_us = (us if np.ndim(us) == 0 else np.asarray(us)[of] for us in (messages.latency_us, messages.link_us))
    end_us = pipeline.run(each_us[of], Messages(latency_us, link_us, messages.blocking))[1]
    return end_us[pipeline.last]


def _messages_of_groups(plan: Plan, costs: LayerCosts, deliveries: Deliveries, iteration: int | slice) -> Messages:
    """The same between groups: of the messages that bring a tensor the largest and the slowest, and the gather behind them
    where all members need all of it."""
    cost, team_of = costs.cost, plan.team_of
    more_us = {(one.sender, one.receiver): one.more_us for one in cost.slow_links}
    links = [*zip(deliveries.senders.tolist(), deliveries.receivers.tolist(), strict=True)]
    number = {link: at for at, link in enumerate(dict.fromkeys(links))}
    of_link = np.array([number[link] for link in links], dtype=np.int64)
    groups = [(team_of.get(sender, (sender,)), team_of.get(receiver, (receiver,))) for sender, receiver in number]
    carried = [shares(*link) for link in groups]
    largest = np.array([max(one.values()) for one in carried])[of_link]
    more = np.array([max((more_us.get(pair, 0.0) for pair in one), default=0.0) for one in carried])[of_link]
    members = np.array([1 if plan.token_parts(takers[0]) > 1 else len(takers) for _, takers in groups])[of_link]
    tokens = costs.tokens[deliveries.micro_batch, iteration]
    further = (...,) + (None,) * (tokens.ndim - 1)
    gather_us = (members - 1)[further] * (cost.sum_us + cost.sum_token_us * tokens / members[further])
    link_us = cost.message_token_us * largest[further] * tokens
    return Messages((cost.message_us + more)[further] + gather_us, link_us, cost.blocking)


def durations_us(schedule: Schedule, costs: LayerCosts, speeds: Speeds, of: Sequence[Action] | None = None) -> Array:
    """Durations of the actions of `schedule.order`, or of some others that it has or that are parts of these:
    [action, iteration]. The costs must know the kinds that the schedule has (`model_for`). A TP group is as fast as its slowest
    member, each of which has its part of the work."""
    return _chunks_us(schedule.plan, schedule.order if of is None else of, costs, speeds)


def _chunks_us(plan: Plan, actions: Sequence[Action], costs: LayerCosts, speeds: Speeds) -> Array:
    # All micro-batches of a stage differ in their work alone.
    number: dict[tuple[str, int, int, int], int] = {}
    keys = [(action.kind, action.first_layer, action.n_layers, action.rank) for action in actions]
    form = np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int64)
    micro_batch = np.array([action.micro_batch for action in actions], dtype=np.int64)
    teams = [plan.team_of.get(rank, (rank,)) for *_, rank in number]
    forms = [
        (kind, first, n, rank, len(team)) for (kind, first, n, _), team in zip(number, teams, strict=True) for rank in team
    ]
    if not plan.teams:
        return _spent_us(plan, _WorkList(forms, form, micro_batch), costs, speeds)
    members = np.array([len(team) for team in teams])
    sizes = members[form]
    begins = np.cumsum(sizes) - sizes
    each = np.arange(int(sizes.sum())) + np.repeat((np.cumsum(members) - members)[form] - begins, sizes)
    weight = np.array([plan.weight_of.get(rank, 1.0) for *_, rank, _ in forms])[each, None]
    spent = _spent_us(plan, _WorkList(forms, each, np.repeat(micro_batch, sizes)), costs, speeds, weight)
    slowest: Array = np.maximum.reduceat(spent, begins, axis=0)
    return slowest + _sums_us(plan, costs, actions, sizes.tolist())


class _WorkList(msgspec.Struct, frozen=True):
    """What ranks do: `forms` (kind, first layer, layers, rank, as one of how many), and of each thing its form and
    micro-batch."""

    forms: Sequence[tuple[str, int, int, int, int]]
    form: Ints
    micro_batch: Ints


def _sums_us(plan: Plan, costs: LayerCosts, actions: Sequence[Action], members: Sequence[int]) -> Array | float:
    """What the groups' sums take in each action: [action, iteration]."""
    cost, of = costs.cost, costs.cost.sums_of(plan.n_layers)
    if not cost.sum_us and not cost.sum_token_us:
        return 0.0
    steps, norms_us = np.empty(len(actions)), np.zeros(len(actions))
    for number, (action, k) in enumerate(zip(actions, members, strict=True)):
        chunk = action.kind, action.first_layer, action.n_layers, of
        again, by_tokens = plan.recomputes(action.rank, action.kind), plan.token_parts(action.rank) > 1
        steps[number] = steps_of_sum(k) * sums_in(*chunk, again=again, sequence_parallel=by_tokens)
        if by_tokens and (norms := norms_in(*chunk)):
            norms_us[number] = steps_of_sum(k) * (cost.sum_us + cost.sum_token_us * norms / k)
    part = costs.tokens[[action.micro_batch for action in actions]] / np.array(members)[:, None]
    return np.asarray(steps[:, None] * (cost.sum_us + cost.sum_token_us * part) + norms_us[:, None])


def _spent_us(plan: Plan, done: _WorkList, costs: LayerCosts, speeds: Speeds, weight: Array | float = 1.0) -> Array:
    """What each of these takes: [n, iteration]; `weight`: the part of the layers over an equal one, [n, 1]."""
    cost, forms = costs.cost, done.forms
    kinds, number = list(cost.chunks), dict[Place, int]()
    layers = np.array([plan.work_of(first, n) for _, first, n, _, _ in forms], dtype=np.float64)[done.form, None]
    head = np.array([first + n == plan.n_layers for _, first, n, _, _ in forms], dtype=np.float64)[done.form, None]
    speed = np.array([speed_of(speeds, rank, kind) for kind, _, _, rank, _ in forms])[done.form, None]
    kind = np.array([kinds.index(one) for one, *_ in forms], dtype=np.int64)[done.form]
    places = [number.setdefault(cost.place_of(rank, tp), len(number)) for *_, rank, tp in forms]
    place = np.array(places, dtype=np.int64)[done.form]
    again = np.array([plan.recomputes(rank, kind) for kind, _, _, rank, _ in forms])[done.form]

    def us(part: int) -> Array:
        of = np.stack([[costs.at(one)[part][name] for name in kinds] for one in number])
        spent: Array = of[place, kind, done.micro_batch]
        spent[again] += of[place[again], kinds.index("F"), done.micro_batch[again]]
        return spent

    layer_us, head_us = us(0), us(1)
    own_us = np.array([[cost.costs_at(one)[name].own_us for name in kinds] for one in number])
    chunk_us = own_us[place, kind] + np.where(again, own_us[place, kinds.index("F")], 0.0)
    return np.asarray((chunk_us[:, None] + weight * (layers * layer_us + head * head_us)) / speed)
