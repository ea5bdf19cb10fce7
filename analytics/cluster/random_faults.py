"""Faults at random, with a seed: `--fault random:seed=7,every=20` or `random:seed=7,rate=llama3,nodes=2048,hours=24`.

Gaps between faults are exponential, as the papers assume: `every` iterations in the mean, or what a published rate
(data/rates.toml) makes of a job of so many `nodes` whose `hours` pass in the run's iterations. The kinds come by their shares
in data/fault_mix.toml. A slow phase lasts a log-normal time. A rank is struck only while each of its layers has another holder
that was not struck in the last `APART` iterations: by then mode auto has brought back who was lost.

A function of (SPEC, layout) alone: the same seed gives the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import log

import msgspec

from unskew.analytics.core.constants import constant
from unskew.analytics.core.faults import (
    MOST_FAULTS,
    FaultError,
    number,
    one_of,
    pairs_of,
    parse_fault,
    together,
    whole,
)
from unskew.analytics.core.plan import Plan
from unskew.collector.events import Fault
from unskew.data import table

KIND = "random"
APART = 15
"""Iterations after a loss in which the other holders of a stage are spared."""
FIRST = 9
"""The first iteration with a fault: before it the predictor has not learned what healthy ones take."""
MEDIAN = 20
"""Iterations that half of the slow phases last, where no hours are given."""
MOST_DELAY_MS = 20.0


class FailureRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published rate, per node of 8 GPUs and day."""

    failures_per_node_day: float
    source: str


class FaultShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often faults are of a kind, in counts of its source."""

    count: float
    source: str


RATES = table("rates", dict[str, FailureRate])
MIX = table("fault_mix", dict[str, FaultShare])


def parse_all(texts: Iterable[str], plan: Plan, *, iterations: int) -> tuple[Fault, ...]:
    """All SPECs of a run that begins with `plan`, those of `random` among them. Raises `FaultError`."""
    named: list[tuple[str, Fault]] = []
    for text in texts:
        if text.partition(":")[0] == KIND:
            named += [(text, fault) for fault in random_faults(text, plan, iterations=iterations)]
        else:
            one = parse_fault(text, ranks=len(plan.ranks), iterations=iterations, schedule=plan.schedule)
            named.append((text, one))
    return together(named, schedule=plan.schedule)


def random_faults(text: str, plan: Plan, *, iterations: int) -> list[Fault]:
    """The faults of one SPEC of `random`, in the order of iterations. Raises `FaultError`."""
    rest = text.partition(":")[2]
    by_rate = "rate=" in rest
    values = pairs_of(text, KIND, rest, ("seed", "rate", "nodes", "hours") if by_rate else ("seed", "every"))
    chance, median = random.Random(whole(text, "seed", values["seed"])), float(MEDIAN)
    if by_rate:
        rate = RATES[one_of(text, "rate", values["rate"], tuple(RATES))].failures_per_node_day
        hours, nodes = number(text, "hours", values["hours"]), whole(text, "nodes", values["nodes"])
        if not (0 < hours < float("inf") and nodes):
            raise FaultError(f"{text}: hours= and nodes= must be greater than 0")
        every = 24 / (rate * nodes) * iterations / hours
        median = constant("slow_median_s") / 3600 * iterations / hours
    else:
        every = number(text, "every", values["every"])
    if not every >= iterations / MOST_FAULTS:
        raise FaultError(f"{text}: a fault every {every:.3g} iterations, allowed: every {iterations / MOST_FAULTS:g} at least")
    found: list[Fault] = []
    at = FIRST + chance.expovariate(1 / every)
    while at < iterations:
        fault = _one(chance, plan, int(at), median, found)
        found += [] if fault is None else [fault]
        at += chance.expovariate(1 / every)
    return found


def _one(chance: random.Random, plan: Plan, at: int, median: float, before: Sequence[Fault]) -> Fault | None:
    """A fault in iteration `at`; None where nobody may be struck."""
    (kind,) = chance.choices(list(MIX), [share.count for share in MIX.values()])
    until = at + max(1, round(chance.lognormvariate(log(median), constant("slow_sigma"))))
    fields: dict[str, object] = {"kind": kind, "at": at}
    if kind in ("slow", "slow_link", "full_disk"):
        fields |= {"rank": chance.choice(plan.ranks), "until": until}
    if kind == "slow":
        factor = 1 / chance.uniform(constant("slow_speed_low"), constant("slow_speed_high"))
        shape = chance.choice(({}, {}, {"ramp": 5}, {"every": 6, "on": 3}, {"of": "memory"}))
        fields |= {"factor": round(factor, 2), **shape}
    elif kind == "slow_link":
        links = sorted({(a.rank, b.rank) for route in plan.routes for a, b in pairwise(route.hops)})
        if not links:
            return None
        sender, receiver = chance.choice(links)
        fields |= {"rank": sender, "peer": receiver, "delay_ms": round(chance.uniform(1.0, MOST_DELAY_MS), 1)}
    elif kind != "full_disk":
        free = _free(plan, at, before)
        if not free:
            return None
        fields |= {"rank": chance.choice(free)} | ({"point": "compute"} if kind == "kill" else {})
    return msgspec.convert(fields, Fault)


def _free(plan: Plan, at: int, before: Sequence[Fault]) -> list[int]:
    """Ranks that may be lost in iteration `at`: they are there, and of each of their layers there is another holder."""
    away = {fault.rank for fault in before if fault.strikes and fault.at_iteration > at - APART}
    here = [role for role in plan.roles if role.rank not in away]
    return [
        role.rank
        for role in here
        if all(any(other.rank != role.rank and layer in other.layers for other in here) for layer in role.layers)
    ]
