"""Plan -> ordered actions per rank, for any legal plan and each schedule; with their durations -> a timeline.

| schedule | order | rule |
|---|---|---|
| gpipe | list scheduling | all forwards of a rank, then its backwards |
| 1f1b | its own | rank d opens with P - d forwards, then one backward and one forward in turn |
| zb-h1 | list scheduling | the same bound, backward split: W fills what would be idle, kept activations as 1F1B's largest |
| interleaved | its own | a loop: each rank has several ranges, groups of as many micro-batches as ranks |
| zb-v | its own | there and back: rank 0 has the first and the last range |
| searched | the plan's own `orders` | what a planner found (planners/adaptis/) |

Orders are decided on unit costs, never on times, so that every process derives the same one. Where a plan does not have the
form that 1f1b, interleaved and zb-v need (a dead rank's micro-batches go elsewhere, counts that do not divide), its order
is found by list scheduling as well, with the rule of 1f1b or zb-h1; so is the order of a searched plan whose `orders` are gone.

Orders of their own are for replicas that are pipelines of their own: all micro-batches of a replica take the same hops
over ranks that serve no other replica, and the hops pass the P ranks once (1F1B), in a loop, V times (interleaved: hop h on
rank ``h mod P``), or there and back (ZB-V: hop h on rank h, then 2P-1-h).

* 1F1B: rank d executes P-d forwards, then one backward and one forward in turn, then what is left, whatever its layers. Layers
  are uneven because speeds are, so that the ranks' chunks take about the same time; an order found with the layers as costs
  took 10 % longer on average (docs/internals/scheduler.md), and this is the order that the planners price.
* interleaved 1F1B (Megatron-LM; Narayanan et al. 2021, section 2.2): rank d first executes ``(V-1) P + 2 (P-d-1)`` forwards,
  then one forward and one backward in turn, then what is left. Forwards take P micro-batches through the rank's first
  range, the same P through its second, and so on; backwards likewise with the ranges reversed. P must divide the micro-batches.
* ZB-V (Qi et al. 2024, "Pipeline parallelism with controllable memory"): rank d opens with ``2 (P-d) - 1`` forwards of its
  first range, then d pairs (second, first), then P-d times forward, backward, weights of the second; in the steady state
  each range in turn does forward, backward, weights; at the end d pairs of backwards, and the weights that they put off. With
  at least 2P-1 micro-batches and F = B = W the only idle time is the P-1 chunks in which the pipeline fills, with the
  activations of P whole micro-batches kept on every rank, as 1F1B's first rank keeps.

The evaluator, for predictor, what-if, Scheduler and simulator (dag.py has the pass itself), has two entries: `evaluate` for a
plan, every chunk of every rank; `pipeline_of` for planners and simulators, one pipeline of a schedule as arrays, cached,
without a plan. Replicas, candidates or iterations of the same form are a further axis of the durations: one pass for all.

>>> pipeline = pipeline_of("1f1b", ranks=4, micro_batches=8)
>>> float(pipeline.makespan_us(per_hop(pipeline, np.array([[1.0] * 4, [2.0] * 4]))))
33.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import zip_longest

import msgspec
import numpy as np

from unskew.analytics.core.layout import plan_from_partition
from unskew.analytics.core.plan import Plan, PlanError, Route, chunk_kinds, stage_order_of
from unskew.analytics.pipeline.actions import Action, ActionKey, action_of, input_of, separate_pipelines
from unskew.analytics.pipeline.dag import Array, Chunks, Messages, chunks_from
from unskew.analytics.pipeline.list_scheduling import listed_order
from unskew.analytics.pipeline.notation import orders_of
from unskew.analytics.pipeline.shared_cores import Cores, run_on_cores
from unskew.collector.events import CHUNK_KINDS, ChunkKind


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """What each rank executes, in order. `order` holds all actions such that each comes after everything it needs.

    The members of a tensor-parallel group execute what its first rank does, together: in `order` it stands for all of them.
    """

    plan: Plan
    by_rank: dict[int, tuple[Action, ...]]
    order: tuple[Action, ...]

    @cached_property
    def chunks(self) -> Chunks:
        """The schedule as arrays, in the order of `order`."""
        at: dict[ActionKey, int] = {}
        last_of: dict[int, int] = {}
        rows = []
        for position, action in enumerate(self.order):
            source = input_of(action, len(self.plan.routes[action.micro_batch].hops))
            needs = last_of.get(action.rank, -1), -1 if source is None else at[source]
            rows.append((CHUNK_KINDS.index(action.kind), action.micro_batch, action.hop, action.rank, *needs))
            at[action.key] = last_of[action.rank] = position
        return chunks_from(rows)


class Timeline(msgspec.Struct, frozen=True, dict=True):
    """When each action of `schedule.order` runs, in us from the iteration's start: arrays [action, ...further axes]."""

    schedule: Schedule
    start_us: Array
    end_us: Array

    @cached_property
    def makespan_us(self) -> Array:
        """End of the last action: [...further axes]."""
        return np.asarray(self.end_us.max(axis=0))

    @cached_property
    def finish_us(self) -> dict[int, Array]:
        """End of each rank's last action; ranks without actions are absent."""
        return {rank: self.end_us[positions[-1]] for rank, positions in self.schedule.chunks.rank_positions()}

    @cached_property
    def busy_us(self) -> dict[int, Array]:
        """Time each rank spends in chunks; the rest of the makespan it waits. Ranks without actions are absent."""
        spent = self.end_us - self.start_us
        return {rank: spent[positions].sum(axis=0) for rank, positions in self.schedule.chunks.rank_positions()}


@lru_cache(maxsize=64)
def build_schedule(plan: Plan) -> Schedule:
    """The schedule of a legal plan: a pure function, the same in every process. Raises `PlanError` for `orders` that cannot be
    executed."""
    lists = orders_of(plan) if plan.orders else _own_orders(plan)
    return schedule_of(plan, listed_order(plan) if lists is None else merged(plan, lists))


def schedule_of(plan: Plan, order: Sequence[Action]) -> Schedule:
    """All actions of a plan in this order."""
    by_rank: dict[int, list[Action]] = {rank: [] for rank in plan.ranks}
    for action in order:
        by_rank[action.rank].append(action)
    for rank, team in plan.team_of.items():
        by_rank[rank] = by_rank[team[0]]
    return Schedule(plan, {rank: tuple(actions) for rank, actions in by_rank.items()}, tuple(order))


def merged(plan: Plan, lists: Mapping[int, Iterable[Action]]) -> list[Action]:
    """The ranks' lists as one order in which each action comes after what it needs: each rank executes as far as it can, and is
    woken by the input it waits for. Raises `PlanError` for lists that wait for each other, repeat an action or lack one."""
    waiting = {rank: iter(actions) for rank, actions in lists.items()}
    asleep: dict[ActionKey, Action] = {}
    done: set[ActionKey] = set()
    order: list[Action] = []

    def ready(action: Action) -> bool:
        source = input_of(action, len(plan.routes[action.micro_batch].hops))
        if source is None or source in done:
            return True
        asleep[source] = action
        return False

    awake = [(action.rank, action) for rank in sorted(waiting) if (action := next(waiting[rank], None)) and ready(action)]
    while awake:
        rank, action = awake.pop()
        key = action.key
        if key in done:
            raise PlanError(f"rank {rank} executes {action.kind} of micro-batch {action.micro_batch}, hop {action.hop}, twice")
        order.append(action)
        done.add(key)
        if (woken := asleep.pop(key, None)) is not None:
            awake.append((woken.rank, woken))
        if (following := next(waiting[rank], None)) is not None and ready(following):
            awake.append((rank, following))
    due = len(chunk_kinds(plan.schedule)) * sum(len(route.hops) for route in plan.routes)
    if asleep:
        stuck = min(asleep.values(), key=lambda action: (action.rank, action.micro_batch))
        raise PlanError(
            f"the orders wait for each other: rank {stuck.rank} cannot start {stuck.kind} of micro-batch {stuck.micro_batch}, "
            f"hop {stuck.hop}"
        )
    if len(order) != due:
        raise PlanError(f"the orders have {len(order)} actions where the plan asks for {due}")
    return order


def evaluate(
    schedule: Schedule, durations_us: Array, messages: float | Array | Messages = 0.0, cores: Cores | None = None
) -> Timeline:
    """The timeline when action i of `schedule.order` takes `durations_us[i]`: [action, ...further axes].

    `messages`: what they cost; a number, or one per action, is how long the message that brings its input is on its way.
    `cores`: those that ranks share; None = each rank has its own.
    """
    chunks = schedule.chunks
    if cores is None:
        return Timeline(schedule, *chunks.run(durations_us, messages))
    start_us, end_us = run_on_cores(*chunks.timed(durations_us, messages), cores)
    return Timeline(schedule, start_us[: len(chunks)], end_us[: len(chunks)])


@lru_cache(maxsize=512)
def pipeline_of(schedule: str, *, ranks: int, micro_batches: int) -> Chunks:
    """One pipeline as arrays: ranks 0..ranks-1, passed as the schedule does. Raises `PlanError` for an unknown schedule."""
    stage_order = stage_order_of(schedule, range(ranks))
    plan = plan_from_partition(
        plan_version=0,
        n_layers=len(stage_order),
        schedule=schedule,
        members=[stage_order],
        layers=[[1] * len(stage_order)],
        micro_batches=[micro_batches],
    )
    return build_schedule(plan).chunks


def per_hop(pipeline: Chunks, costs_us: Array) -> Array:
    """Durations of a pipeline's chunks from costs per kind and hop: [kind, hop, ...axes] -> [chunk, ...axes].

    Kinds are those of the schedule: F, B (whole) or F, B, W. A hop is one range of layers, in stage order.
    """
    return np.asarray(costs_us[pipeline.kind, pipeline.hop])


def _own_orders(plan: Plan) -> dict[int, list[Action]] | None:
    """The actions per rank; None when the schedule is another one, or a replica has not the form."""
    if plan.schedule not in ("1f1b", "interleaved", "zb-v"):
        return None
    pipelines = separate_pipelines(plan)
    if pipelines is None:
        return None
    lists: dict[int, list[Action]] = {rank: [] for rank in plan.ranks}
    for routes in pipelines:
        stage_order = [hop.rank for hop in routes[0].hops]
        ranks = list(dict.fromkeys(stage_order))
        passes = len(stage_order) // len(ranks)
        if plan.schedule == "1f1b" and stage_order == ranks:
            lists.update({rank: _one_f_one_b(routes, d, len(ranks)) for d, rank in enumerate(ranks)})
        elif plan.schedule == "zb-v" and stage_order == [*ranks, *reversed(ranks)]:
            lists.update({rank: _zb_v(routes, d, len(ranks)) for d, rank in enumerate(ranks)})
        elif plan.schedule == "interleaved" and passes > 1 and stage_order == ranks * passes and len(routes) % len(ranks) == 0:
            lists.update({rank: _interleaved(routes, d, len(ranks), passes) for d, rank in enumerate(ranks)})
        else:
            return None
    return lists


def _one_f_one_b(routes: Sequence[Route], d: int, n_ranks: int) -> list[Action]:
    forwards, backwards = ([action_of(route, kind, d) for route in routes] for kind in CHUNK_KINDS[:2])
    warm_up = n_ranks - d
    order = forwards[:warm_up]
    for backward, forward in zip_longest(backwards, forwards[warm_up:]):
        order += [backward] if forward is None else [backward, forward]
    return order


def _interleaved(routes: Sequence[Route], d: int, n_ranks: int, passes: int) -> list[Action]:
    numbers = range(len(routes))
    turns = sorted((m // n_ranks, part, m) for m in numbers for part in range(passes))
    forwards = [action_of(routes[m], "F", part * n_ranks + d) for _, part, m in turns]
    backwards = [action_of(routes[m], "B", (passes - 1 - part) * n_ranks + d) for _, part, m in turns]
    warm_up = min((passes - 1) * n_ranks + 2 * (n_ranks - d - 1), len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def _zb_v(routes: Sequence[Route], d: int, n_ranks: int) -> list[Action]:
    total = len(routes)
    done = {(kind, part): 0 for kind in CHUNK_KINDS for part in (0, 1)}
    before: dict[ChunkKind, ChunkKind] = {"B": "F", "W": "B"}
    order: list[Action] = []

    def do(*steps: tuple[ChunkKind, int]) -> None:
        """The next micro-batch of each step, where there is one whose chunk before is done."""
        for kind, part in steps:
            if done[kind, part] < (total if kind == "F" else done[before[kind], part]):
                order.append(action_of(routes[done[kind, part]], kind, d if part == 0 else 2 * n_ranks - 1 - d))
                done[kind, part] += 1

    for _ in range(2 * (n_ranks - d) - 1):
        do(("F", 0))
    for _ in range(d):
        do(("F", 1), ("F", 0))
    for _ in range(n_ranks - d):
        do(("F", 1), ("B", 1), ("W", 1))
    while done["F", 1] < total:
        do(("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
    for _ in range(d):
        do(("B", 0), ("B", 1))
    for _ in range(n_ranks - d):
        do(("B", 0), ("W", 0))
    while len(order) < 6 * total:
        do(("B", 0), ("W", 0), ("B", 1), ("W", 1))
    return order
