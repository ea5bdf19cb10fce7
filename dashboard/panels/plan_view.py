"""Who holds what: one bar per replica, as wide as the model is deep, cut where a rank's layers end.

A block names the rank, its layers and how many micro-batches it executes; slow, dead and changed are written in words. The same
bars show the plan in force and a proposed one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import streamlit as st

from unskew.analytics.core.plan import Plan, Role
from unskew.analytics.core.run_state import RunState
from unskew.analytics.shards.parts import size_of
from unskew.dashboard.data import Snapshot
from unskew.dashboard.theme import card, empty, escape, title
from unskew.dashboard.wording import count


class PlanBlock(msgspec.Struct, frozen=True):
    """One block: a role, what it executes now and before, and how its rank is."""

    role: Role
    micro_batches: int
    rerouted_in: int
    speed: float | None = None
    dead: bool = False
    was: str = ""


def places(
    plan: Plan, before: Plan | None, speeds: Mapping[int, float], lost: Mapping[int, Role]
) -> dict[int, list[PlanBlock]]:
    """replica -> its places by layer; a lost rank keeps its place, marked dead, until others of its replica hold its layers."""
    load, foreign = plan.executed, _rerouted_in(plan)
    old_load = before.executed if before else Counter[int]()
    roles = [*plan.roles, *(role for rank, role in lost.items() if rank not in plan.role_of and not _covered(role, plan))]
    found: dict[int, list[PlanBlock]] = {}
    for role in sorted(roles, key=lambda role: (role.replica, role.first_layer, role.shard)):
        dead = role.rank in lost
        place = PlanBlock(
            role=role,
            micro_batches=0 if dead and role.rank not in plan.role_of else load[role.rank],
            rerouted_in=foreign[role.rank],
            speed=speeds.get(role.rank),
            dead=dead,
            was=""
            if dead or before is None
            else _was(role, load[role.rank], before.role_of.get(role.rank), old_load[role.rank]),
        )
        found.setdefault(role.replica, []).append(place)
    return found


def _covered(gone: Role, plan: Plan) -> bool:
    """Whether ranks of its own replica hold layers that a lost rank held."""
    return any(role.replica == gone.replica and not set(role.layers).isdisjoint(gone.layers) for role in plan.roles)


def _rerouted_in(plan: Plan) -> Counter[int]:
    """rank -> micro-batches it executes whose home is another replica."""
    return Counter(
        rank
        for route in plan.routes
        for rank in {rank for hop in route.hops for rank in hop.ranks}
        if plan.role_of[rank].replica != route.replica
    )


def _was(role: Role, load: int, old: Role | None, old_load: int) -> str:
    if old is None:
        return "new"
    was = [count(len(old.layers), "layer")] if old.ranges != role.ranges else []
    was += [f"{old_load} mb"] if load != old_load else []
    return f"was {', '.join(was)}" if was else ""


def draw(
    plan: Plan, before: Plan | None, speeds: Mapping[int, float], lost: Mapping[int, Role], standby: Sequence[int] = ()
) -> str:
    """The bars as HTML, and the ranks that live without a part in the plan."""
    rows = []
    homes = Counter(route.replica for route in plan.routes)
    for replica, row in places(plan, before, speeds, lost).items():
        ranges = sorted(((held, place) for place in row for held in place.role.ranges), key=lambda part: part[0])
        blocks = "".join(_block(place, n_layers) for (_, n_layers), place in ranges)
        without = [f"without rank {rank}" for rank, role in lost.items() if role.replica == replica and _covered(role, plan)]
        facts = "<br>".join([f"{homes[replica]} mb", *without])
        name = f'replica {replica}<br><span class="u-muted">{facts}</span>'
        rows.append(f'<div class="u-replica">{name}</div><div class="u-bar">{blocks}</div>')
    if standby:
        ranks = "".join(
            f'<div class="u-block u-slow"><b>rank {rank}{_slow(speeds.get(rank))}</b>'
            '<span class="u-sub">0 layers · no vote · measured</span></div>'
            for rank in standby
        )
        rows.append(f'<div class="u-replica">on standby</div><div class="u-bar">{ranks}</div>')
    step = max(1, -(-plan.n_layers // 32))
    ruler = "".join(f"<span>{layer if layer % step == 0 else ''}</span>" for layer in range(plan.n_layers))
    head = f'<div class="u-replica u-muted">layer</div><div class="u-ruler">{ruler}</div>'
    return f'<div class="u-scroll"><div class="u-plan">{head}{"".join(rows)}</div></div>'


def _block(place: PlanBlock, n_layers: int) -> str:
    """One range of layers of a rank; a rank that a micro-batch passes more than once has several."""
    role = place.role
    layers = ", ".join(f"{first}–{first + held - 1}" if held > 1 else str(first) for first, held in role.ranges)
    state = "dead" if place.dead else _slow(place.speed).removeprefix(" · ")
    look = "u-dead" if place.dead else ("u-slow" if state else "")
    look += " u-changed" if place.was else ""
    work = "its micro-batches go elsewhere" if place.dead else f"{place.micro_batches} mb"
    if place.rerouted_in:
        work += f", {place.rerouted_in} rerouted in"
    work += ", sequence-parallel" if role.sequence_parallel else ""
    work += ", recomputes" if role.recompute else ""
    was = f'<span class="u-sub u-was">{escape(place.was)}</span>' if place.was else ""
    full = f"rank {role.rank}: layers {layers}, {work}{', ' + state if state else ''}{', ' + place.was if place.was else ''}"
    return (
        f'<div class="u-block {look}" style="flex: {n_layers * size_of(role.part):g} 1 0" title="{escape(full)}">'
        f"<b>rank {role.rank}{' · ' + state if state else ''}</b>"
        f'<span class="u-sub">{count(n_layers, "layer")} · {escape(work)}</span>{was}</div>'
    )


def _slow(speed: float | None) -> str:
    return f" · speed {speed:.2f}" if speed is not None and speed < 0.995 else ""


def standby_of(state: RunState, plan: Plan, lost: Mapping[int, Role]) -> list[int]:
    """Living ranks that had a part in some plan of the run and have none in this one."""
    return sorted(state.last_roles.keys() - plan.role_of.keys() - lost.keys())


def speeds_of(state: RunState) -> dict[int, float]:
    """rank -> its slowest kind of work, from the open verdicts."""
    return {
        party.rank: min(verdict.speed.values())
        for verdict in (one.verdict for one in state.open_verdicts)
        if verdict.speed
        for party in verdict.culprits
        if party.rank is not None
    }


def lost_of(state: RunState) -> dict[int, Role]:
    """rank -> the last role it had, for ranks that are lost."""
    return {rank: role for rank, role in state.last_roles.items() if rank in state.lost}


def previous(state: RunState, plan_version: int) -> Plan | None:
    """The plan that was in force before plan `plan_version`."""
    return next((one.plan for one in reversed(state.plans) if one.event.plan_version < plan_version), None)


def show(snapshot: Snapshot) -> None:
    """The plan in force, against the one before it."""
    state = snapshot.state
    with card("plan"):
        if state.plan is None:
            title("Plan")
            empty("0 plans applied." if snapshot.over else "0 plans applied yet.")
            return
        applied, plan = state.plan.event, state.plan.plan
        reason = f": {applied.reason}" if applied.reason else ""
        title(
            f"Plan {applied.plan_version}: who holds what", f"since iteration {applied.iteration}{reason} · mb = micro-batches"
        )
        speeds, lost = speeds_of(state), lost_of(state)
        st.html(draw(plan, previous(state, applied.plan_version), speeds, lost, standby_of(state, plan, lost)))
        for proposed in (proposal.proposed for proposal in state.open_proposals):
            title(f"Plan {proposed.plan_version} as proposed", f"by {proposed.proposal}, against plan {applied.plan_version}")
            after = Plan.from_data(proposed.plan)
            st.html(draw(after, plan, speeds, lost, standby_of(state, after, lost)))
