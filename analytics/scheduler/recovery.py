"""Minimal recovery after a death: reroute, no layer moves (ReCycle's rerouting, as ResiHP section 6.3 uses it), or promote.

The dead ranks' roles vanish; each hop they had a part in goes to peers that hold its layers, so training can go on at once in
the same processes. Where the holders' ranges differ the hop is split. Steps, per micro-batch in order: keep the legs of living
ranks; from the first uncovered layer on take the least loaded holder (then the one that reaches furthest, then the lowest rank)
as far as it reaches; join neighbouring legs of one rank. Load is layers x micro-batches, counted over the whole plan.

A holder is a rank that has whole layers, or a tensor-parallel group that is all there. A group that lost a member executes
nothing more, for its others have parts alone; they stay as copies of these, and where such leftovers of several groups make up
whole layers, they are a group. What two of them have alike one of them leaves to the other: its part begins where that one's
ends, nothing moves, and what it held of the iteration's gradients is redone.

`promote` gives the dead rank's place to one on standby instead, within the same iteration (a spare of ReCoVer, arXiv
2605.11215; its spares hold a copy of the layers, ours get them from the other holders).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache, partial
from math import inf

import msgspec

from unskew.analytics.core.plan import Hop, Plan, PlanError, Role, Route, ruled, validate
from unskew.analytics.shards.parts import ONE, ZERO, ends_of, part_between


class Holder(msgspec.Struct, frozen=True):
    """Who can execute: a rank, or the members of a group in the order of their shards."""

    roles: tuple[Role, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(role.rank for role in self.roles)

    def reach(self, layer: int) -> int:
        """End of the range of layers from `layer` on that all members hold; `layer` itself when they do not hold it."""
        return min(role.reach(layer) for role in self.roles)


REROUTED = "its work is rerouted to ranks that hold its layers"
MIN_GAIN = 0.03
"""Of an iteration: for less the layers of a lost rank are not moved to a spare; the Scheduler asks for as much."""


def recover_with_spares(
    plan: Plan,
    dead: set[int],
    plan_version: int,
    spares: Collection[int],
    expected_us: Callable[[Plan], float | None],
    *,
    fitted: Callable[[Plan], Plan] = lambda plan: plan,
) -> tuple[Plan, str]:
    """The plan without the `dead` ranks, by rerouting or, where that is expected to be faster or ranks have no room for it, by
    promoting one of `spares`; and what becomes of the work. `fitted`: a plan as its ranks can hold it, raises `PlanError` where
    they cannot. Raises `PlanError` as `recover` does, and where no plan fits."""
    rerouted, found = recover(plan, dead, plan_version), list[tuple[float, Plan, str]]()
    try:
        rerouted = fitted(rerouted)
        rerouted_us = expected_us(rerouted) if spares and len(dead) == 1 else None
        if rerouted_us is None:
            return rerouted, REROUTED
        found.append(((1 - MIN_GAIN) * rerouted_us, rerouted, REROUTED))
    except PlanError:
        if not spares or len(dead) > 1:
            raise
    for spare in sorted(spares):
        with suppress(PlanError):
            promoted = fitted(promote(plan, min(dead), spare, plan_version))
            found.append((expected_us(promoted) or inf, promoted, f"rank {spare} takes its place, with layers from its peers"))
    if not found:
        raise PlanError(f"neither by rerouting nor with a spare do ranks have room for the work of rank {min(dead)}")
    _, best, how = min(found, key=lambda one: one[0])
    return best, how


def recover(plan: Plan, dead: set[int], plan_version: int) -> Plan:
    """The plan without the `dead` ranks, numbered `plan_version`; that somebody recomputes is for others to say
    (`Room.fitted`). Raises `PlanError` naming layers that nobody holds."""
    plan = plan.recomputing(())
    roles = tuple(role for role in plan.roles if role.rank not in dead)
    holders = _holders(plan, roles)
    _require_holders(plan, holders, dead)
    recut = {role.rank: role for holder in holders for role in holder.roles}
    roles = tuple(recut.get(role.rank, role) for role in roles)
    load = Counter({holder.ranks: 0 for holder in holders})
    for route in plan.routes:
        load.update({hop.ranks: hop.n_layers for hop in route.hops if dead.isdisjoint(hop.ranks)})
    able = cache(partial(_able, holders))
    routes = []
    for route in plan.routes:
        hops: list[Hop] = []
        for hop in route.hops:
            for leg in [hop] if dead.isdisjoint(hop.ranks) else _replacement(hop, able, load):
                _append(hops, leg)
        routes.append(Route(micro_batch=route.micro_batch, replica=route.replica, hops=tuple(hops)))
    recovered = Plan(
        plan_version=plan_version,
        n_layers=plan.n_layers,
        schedule=ruled(plan.schedule),
        roles=roles,
        routes=tuple(routes),
        layer_weights=plan.layer_weights,
    )
    validate(recovered)
    return recovered


def promote(plan: Plan, dead: int, spare: int, plan_version: int) -> Plan:
    """The plan with `spare`, which has no role in it, in place of `dead`."""
    roles = (msgspec.structs.replace(role, rank=spare) if role.rank == dead else role for role in plan.roles)
    routes = (
        msgspec.structs.replace(
            route,
            hops=tuple(
                msgspec.structs.replace(hop, ranks=tuple(spare if rank == dead else rank for rank in hop.ranks))
                for hop in route.hops
            ),
        )
        for route in plan.routes
    )
    promoted = msgspec.structs.replace(plan, plan_version=plan_version, roles=tuple(roles), routes=tuple(routes))
    validate(promoted)
    return promoted


def _holders(plan: Plan, roles: Sequence[Role]) -> list[Holder]:
    """Every living rank that can execute, in exactly one holder; groups that are all there first, then new ones, of parts as
    they are before others."""
    role_of = {role.rank: role for role in roles}
    groups = dict.fromkeys(ranks for ranks in plan.teams if role_of.keys() >= set(ranks))
    holders = [Holder((role,)) for role in roles if role.part is None]
    holders += [Holder(tuple(role_of[rank] for rank in ranks)) for ranks in groups]
    left = [role for role in roles if role.part is not None and not any(role.rank in ranks for ranks in groups)]
    for recut in (False, True):
        while (group := next(_groups(left, (), ZERO, recut=recut), None)) is not None:
            holders.append(Holder(group))
            left = [role for role in left if role.rank not in holders[-1].ranks]
    return holders


def _groups(left: Sequence[Role], chosen: tuple[Role, ...], at: Fraction, *, recut: bool) -> Iterator[tuple[Role, ...]]:
    """Ways to go on from `chosen`, whose parts end `at`, to members that make up layers which all of them hold; where `recut`,
    also with who begins before that, and then begins there."""
    if at == ONE:
        yield chosen
        return
    for role in left:
        low, high = ends_of(role.part)
        together = set(role.layers).intersection(*(other.layers for other in chosen))
        if together and (low == at or (recut and low < at < high)):
            mine = role if low == at else msgspec.structs.replace(role, part=part_between(at, high))
            yield from _groups(left, (*chosen, mine), high, recut=recut)


def _require_holders(plan: Plan, holders: Sequence[Holder], dead: set[int]) -> None:
    lost = [layer for layer in range(plan.n_layers) if not any(holder.reach(layer) > layer for holder in holders)]
    if lost:
        names = f"layer {lost[0]}" if len(lost) == 1 else f"layers {', '.join(map(str, lost))}"
        raise PlanError(
            f"no living rank holds {names} after the loss of {', '.join(f'rank {rank}' for rank in sorted(dead))}: "
            "a checkpoint is needed to go on"
        )


def _able(holders: Sequence[Holder], layer: int) -> list[tuple[tuple[int, ...], int]]:
    """Who holds a layer, and the end of the range from there on that they hold."""
    return [(holder.ranks, end) for holder in holders if (end := holder.reach(layer)) > layer]


def _replacement(
    hop: Hop, able: Callable[[int], Sequence[tuple[tuple[int, ...], int]]], load: Counter[tuple[int, ...]]
) -> list[Hop]:
    """The hop's layers on living holders, those `able` to execute each; adds what they take on to `load`."""
    legs = []
    first, end = hop.first_layer, hop.first_layer + hop.n_layers
    while first < end:
        ranks, reach = min(able(first), key=lambda one: (load[one[0]], -one[1], one[0]))
        taken = min(reach, end) - first
        legs.append(Hop(first_layer=first, n_layers=taken, ranks=ranks))
        load[ranks] += taken
        first += taken
    return legs


def _append(hops: list[Hop], leg: Hop) -> None:
    if hops and hops[-1].ranks == leg.ranks:
        last = hops.pop()
        leg = Hop(first_layer=last.first_layer, n_layers=last.n_layers + leg.n_layers, ranks=leg.ranks)
    hops.append(leg)
