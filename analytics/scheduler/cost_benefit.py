"""What an iteration takes under a plan, and whether a better plan is worth its change.

**The price** (`Pricing`), on the recent batches. Replicas that are pipelines of their own are evaluated apart. Where all
micro-batches are alike, as in simulated jobs, each distinct one is evaluated once: a job of a thousand devices then costs
hardly more than the replicas that differ.

**Its worth**: how sure its gain is (`interval`), and gain against cost over the expected life of the fault (`weigh`; ours, no
paper has this).

A plan for a slow device earns only while the device is slow. The time that slow phases last is heavy-tailed: the longer one
has lasted, the longer it will. `FaultLife` is a log-normal law of that time; its defaults are the field's figures (mean 72
min over 16 slow phases of jobs of at least 512 GPUs, up to nearly ten hours: Greyhound, ATC'25; sigma 1.3 fits both). With
t = how long the fault has lasted, T = its duration, r = what is left of the run:

1. expected life ``E[min(T - t, r) | T > t]``, numerically; what is dead stays dead: r;
2. cost = cost of the change + P(T - t < r) x the same once more, for the change back: hysteresis against faults that come
   and go;
3. worth it iff gain per second x expected life >= margin x cost;
4. payback = cost of the change / gain per second; risk = P(T - t < payback | T > t), the probability that the fault ends
   before the change is repaid.

>>> FaultLife().remaining_s(0.0, 1e9) / 60  # doctest: +ELLIPSIS
72.1...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean

import msgspec
import numpy as np
from scipy.special import stdtrit

from unskew.analytics.core.constants import constant
from unskew.analytics.core.cost import Speeds
from unskew.analytics.core.plan import PASSES, Plan, Route, chunk_kinds
from unskew.analytics.pipeline.actions import separate_pipelines
from unskew.analytics.pipeline.dag import Array
from unskew.analytics.pipeline.list_scheduling import listed_order
from unskew.analytics.pipeline.prediction import LayerCosts, alike_finish_us, synced_us, timeline_of
from unskew.analytics.pipeline.schedule import Schedule, Timeline, build_schedule, schedule_of


class Price(msgspec.Struct, frozen=True):
    """`iteration_us` [iteration]; `last`: the replica that finishes last, in the mean."""

    iteration_us: Array
    last: int


class Pricing:
    """Prices plans of one schedule and remembers the pipelines that it has evaluated; `scheduled_actions`: how many so far."""

    def __init__(self, costs: LayerCosts, speeds: Speeds) -> None:
        self.costs, self.speeds, self.scheduled_actions = costs, speeds, 0
        self._alike = all(bool((work == work[:1, :1]).all()) for work in (costs.tokens, costs.sum_sq))
        self._known: dict[object, tuple[Array, int]] = {}
        self._devices: dict[int, tuple[object, str]] = {}
        self._priced: dict[int, tuple[Plan, Price]] = {}

    def of(self, plan: Plan) -> Price:
        """The price of an iteration under `plan`, the end of the iteration included."""
        if id(plan) not in self._priced:
            self._priced[id(plan)] = plan, self._price(plan)
        return self._priced[id(plan)][1]

    def _price(self, plan: Plan) -> Price:
        tied = self.costs.cost.sync is not None or self.costs.cost.cores is not None  # by sums of gradients, or by cores
        pipelines = None if tied else _apart(plan)
        if pipelines is not None:
            ends = [self._pipeline(plan, routes) for routes in pipelines]
        else:
            ends = [self._whole(plan)] if tied or not _listed(plan) else [*self._together(plan)]
        _, last = max(ends, key=lambda end: float(end[0].mean()))
        latest_us = np.maximum.reduce([end_us for end_us, _ in ends])
        return Price(latest_us + self.costs.cost.end_us(plan), plan.role_of[last].replica)

    def _pipeline(self, plan: Plan, routes: Sequence[Route]) -> tuple[Array, int]:
        """When a pipeline of its own ends, and the rank that ends last."""
        ranks = sorted({rank for hop in routes[0].hops for rank in hop.ranks})
        if not self._alike:
            return self._evaluated(_alone(plan, routes, ranks), [route.micro_batch for route in routes])
        key = self._key(plan, routes, ranks)
        if key not in self._known:
            if plan.schedule == "1f1b":
                end_us, last = self._of_hops(plan, routes, ranks)
            else:
                end_us, last = self._evaluated(_alone(plan, routes, ranks), [route.micro_batch for route in routes])
            self._known[key] = end_us, ranks.index(last)
        end_us, place = self._known[key]
        return end_us, ranks[place]

    def _of_hops(self, plan: Plan, routes: Sequence[Route], ranks: Sequence[int]) -> tuple[Array, int]:
        """The same where all micro-batches are alike and 1F1B orders them."""
        hops = routes[0].hops
        self.scheduled_actions += 2 * len(hops) * len(routes)
        one = _alone(plan, routes[:1], ranks)
        finish_us = alike_finish_us(one, one.routes[0], len(routes), self.costs, self.speeds)
        place_of = {hop.rank: place for place, hop in enumerate(hops)}
        last = max(sorted(place_of), key=lambda rank: float(finish_us[place_of[rank]].mean()))
        return np.asarray(finish_us.max(axis=0)), last

    def _together(self, plan: Plan) -> Iterator[tuple[Array, int]]:
        """The same of replicas that exchange work, apart from those that exchange none with them. List scheduling orders them
        all, which is the same for each whether the others are there or not."""
        self.scheduled_actions += len(chunk_kinds(plan.schedule)) * sum(len(route.hops) for route in plan.routes)
        for routes in _components(plan):
            ranks = sorted({rank for route in routes for hop in route.hops for rank in hop.ranks})
            alike = self._alike and all(route.hops == routes[0].hops for route in routes)
            key = ("listed", self._key(plan, routes, ranks)) if alike else None
            if key is None or key not in self._known:
                own = _alone(plan, routes, ranks)
                timeline = self._timeline(schedule_of(own, listed_order(own)), [route.micro_batch for route in routes])
                end_us, last = timeline.makespan_us, _last(timeline)
            else:
                end_us, place = self._known[key]
                last = ranks[place]
            if key is not None:
                self._known[key] = end_us, ranks.index(last)
            yield end_us, last

    def _whole(self, plan: Plan) -> tuple[Array, int]:
        return self._evaluated(plan, range(len(plan.routes)))

    def _evaluated(self, plan: Plan, micro_batches: Sequence[int]) -> tuple[Array, int]:
        schedule = build_schedule(plan)
        self.scheduled_actions += len(schedule.order)
        timeline = self._timeline(schedule, micro_batches)
        return synced_us(timeline, self._costs_of(micro_batches), self.speeds), _last(timeline)

    def _timeline(self, schedule: Schedule, micro_batches: Sequence[int]) -> Timeline:
        return timeline_of(schedule, self._costs_of(micro_batches), self.speeds)

    def _costs_of(self, micro_batches: Sequence[int]) -> LayerCosts:
        chosen = list(micro_batches)
        return LayerCosts(self.costs.cost, self.costs.tokens[chosen], self.costs.sum_sq[chosen])

    def _key(self, plan: Plan, routes: Sequence[Route], ranks: Sequence[int]) -> object:
        """Equal for pipelines that take the same time: ranks only by their order, with their speeds, classes and links."""
        cost, number = self.costs.cost, {rank: place for place, rank in enumerate(ranks)}
        role_of, device = plan.role_of, self._device
        roles = [role_of[rank] for rank in ranks]
        who = tuple((role.part, role.recompute, role.sequence_parallel, *device(role.rank)) for role in roles)
        path = tuple((hop.first_layer, hop.n_layers, tuple(number[rank] for rank in hop.ranks)) for hop in routes[0].hops)
        links = tuple(
            (number[one.sender], number[one.receiver], one.more_us)
            for one in cost.slow_links
            if one.sender in number and one.receiver in number
        )
        order = [
            tuple(value for role, value in zip(plan.roles, values, strict=False) if role.rank in number)
            for values in (plan.paces, plan.in_flight)
        ]
        return plan.schedule, plan.layer_weights, who, path, len(routes), links, *order

    def _device(self, rank: int) -> tuple[object, str]:
        """What is known of a rank: its speeds, its class."""
        if rank not in self._devices:
            speeds = tuple(sorted(self.speeds.get(rank, {}).items()))
            self._devices[rank] = speeds, self.costs.cost.class_of.get(rank, "")
        return self._devices[rank]


def _apart(plan: Plan) -> list[list[Route]] | None:
    """The replicas that are pipelines of their own, where the order of each is one that it has alone; else None."""
    if plan.orders or PASSES.get(plan.schedule) != 1:
        return None
    pipelines = separate_pipelines(plan)
    once = pipelines is not None and all(
        len({hop.rank for hop in routes[0].hops}) == len(routes[0].hops) for routes in pipelines
    )
    return pipelines if once else None


def _last(timeline: Timeline) -> int:
    """The rank that ends last."""
    finish_us = timeline.finish_us
    return max(finish_us, key=lambda rank: float(finish_us[rank].mean()))


def _listed(plan: Plan) -> bool:
    """Whether list scheduling orders all chunks, because replicas do each other's work."""
    return not plan.orders and PASSES.get(plan.schedule) == 1 and separate_pipelines(plan) is None


def _components(plan: Plan) -> list[list[Route]]:
    """The routes of replicas that share ranks, together, in their order."""
    component = {route.replica: {route.replica} for route in plan.routes}
    home_of: dict[int, int] = {}
    for route in plan.routes:
        for hop in route.hops:
            other = home_of.setdefault(hop.rank, route.replica)
            if component[other] is not component[route.replica]:
                component[other] |= component[route.replica]
                component.update(dict.fromkeys(component[other], component[other]))
    found: dict[int, list[Route]] = {}
    for route in plan.routes:
        found.setdefault(min(component[route.replica]), []).append(route)
    return [*found.values()]


def _alone(plan: Plan, routes: Sequence[Route], ranks: Sequence[int]) -> Plan:
    """A pipeline as a plan of its own, its micro-batches counted from 0."""
    if len(routes) == len(plan.routes):
        return plan
    own = set(ranks)
    kept = [place for place, role in enumerate(plan.roles) if role.rank in own]
    return msgspec.structs.replace(
        plan,
        roles=tuple(plan.roles[place] for place in kept),
        routes=tuple(msgspec.structs.replace(route, micro_batch=m) for m, route in enumerate(routes)),
        paces=tuple(plan.paces[place] for place in kept) if plan.paces else (),
        in_flight=tuple(plan.in_flight[place] for place in kept) if plan.in_flight else (),
    )


class FaultLife(msgspec.Struct, frozen=True, kw_only=True):
    """A log-normal law of how long slow phases last."""

    median_s: float = constant("slow_median_s")
    sigma: float = constant("slow_sigma")

    def survives(self, age_s: float, further_s: float) -> float:
        """P(T > age + further | T > age)."""
        return self._tail(age_s + further_s) / self._tail(age_s)

    def remaining_s(self, age_s: float, at_most_s: float) -> float:
        """``E[min(T - age, at_most) | T > age]`` in seconds: the integral of the survival, by quadrature in log time."""
        if at_most_s <= 0:
            return 0.0
        horizon = min(at_most_s, self.median_s * math.exp(8 * self.sigma) + age_s)
        edges = np.concatenate([[0.0], np.geomspace(horizon * 1e-6, horizon, 400)])
        survival = np.array([self.survives(age_s, float(edge)) for edge in edges])
        return float(np.trapezoid(survival, edges))

    def _tail(self, t_s: float) -> float:
        if t_s <= 0:
            return 1.0
        return max(0.5 * math.erfc(math.log(t_s / self.median_s) / (self.sigma * math.sqrt(2.0))), 1e-300)


class CostBenefit(msgspec.Struct, frozen=True, kw_only=True):
    """`life_s`: how long the gain is expected to last; `cost_s` with the change back; `payback_s` None when nothing is
    gained."""

    worth: bool
    life_s: float
    benefit_s: float
    cost_s: float
    payback_s: float | None
    risk: float


def weigh(
    *,
    gain_per_s: float,
    cost_s: float,
    remaining_s: float,
    slow_for_s: float | None,
    margin: float = 1.5,
    life: FaultLife | None = None,
) -> CostBenefit:
    """`gain_per_s`: seconds saved per second of work; `slow_for_s`: age of the fault, None = it will not heal."""
    law = life or FaultLife()
    lasts_s = remaining_s if slow_for_s is None else law.remaining_s(slow_for_s, remaining_s)
    heals = 0.0 if slow_for_s is None else 1.0 - law.survives(slow_for_s, remaining_s)
    benefit_s, total_s = gain_per_s * lasts_s, cost_s * (1.0 + heals)
    payback_s = cost_s / gain_per_s if gain_per_s > 0 else None
    risk = 1.0
    if payback_s is not None and payback_s <= remaining_s:
        risk = 0.0 if slow_for_s is None else 1.0 - law.survives(slow_for_s, payback_s)
    return CostBenefit(
        worth=gain_per_s > 0 and benefit_s >= margin * total_s,
        life_s=lasts_s,
        benefit_s=benefit_s,
        cost_s=total_s,
        payback_s=payback_s,
        risk=risk,
    )


def interval(values: Sequence[float], *, drawn: bool = False) -> tuple[float, float]:
    """95 % interval of the mean of two values or more: Student's t on a reduced number of values; on all that were `drawn` at
    random, one by one.

    Neighbours in time are no independent witnesses: n counts as ``n (1 - r) / (1 + r)``, r = lag-1 autocorrelation in [0, 0.9],
    its estimate raised by what it falls short of on average, ``(1 + 4 r) / n`` (Kendall 1954).
    """
    n, mean = len(values), fmean(values)
    deviation = [value - mean for value in values]
    square = sum(d * d for d in deviation)
    if square == 0.0:
        return mean, mean
    estimate = sum(a * b for a, b in pairwise(deviation)) / square
    correlation = min(max(estimate + (1 + 4 * estimate) / n, 0.0), 0.9)
    effective = n if drawn else max(2.0, n * (1 - correlation) / (1 + correlation))
    half = float(stdtrit(effective - 1, 0.975)) * math.sqrt(square / (n - 1) / effective)
    return mean - half, mean + half
