"""Malleus: groups per node, pipelines of unequal groups, two integer programs (SIGMOD'25, arXiv 2410.13333).

1. A device's straggling rate is 1 / speed; below 1.2 it counts as 1.0 (`rates`).
2. Per node (`cut_node`): the fastest devices form whole groups of the nominal degree tp; the last tp places are either one
   group more or are cut into descending powers of two from a chosen size on (4, 2, 1), so as to maximise the throughput
   ``R = sum 1 / y``; what is left over is suspended. A group's rate is ``y = alpha(tp / k) x its slowest member's rate``, with
   alpha the measured slow-down of a layer on fewer devices.
3. Pipelines (malleus_templates.py): straggling groups at the front stages of pipelines, the slowest first; stage counts
   differ by at most one; the best template, exactly where a full enumeration could end. Where none fits the memory, fewer
   pipelines, then without the smallest groups, then with nodes cut for memory: a plan is refused only where none of these is.
4. ILP 1 (`layers_of`), per pipeline: ``min max_j y_j l_j``, whole ``l_j >= 0`` summing to L, within the memory. Optimum o_i.
5. ILP 2 (`micro_batches_of`): ``min max_i o_i m_i``, ``sum m_i = M``, ``m_i >= stages of i``.
6. The template with the least ``max_i o_i m_i`` is filled with devices (`fill`): a whole group stays in its replica and takes
   the place whose layers overlap most with those that it holds; what a replica cannot place goes to others by the same overlap.
7. Re-plan (`must_replan`) only when some device's rate moved by 0.3 or more, or one died or came back.

Both programs go to HiGHS (scipy.optimize.milp): `share_out` (core/sharing.py) reaches the same optima by other shares, which
are not what the paper's figures were compared with. Embedding and head take memory at the first and the last stage and, as in
the paper's ILP 1, no time. Simplified: no cross-node cost in step 6; the paper's weight(k) in R is 1; where there are fewer
micro-batches than stages, for which the paper's ILP 2 has no answer, each pipeline has one at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

import msgspec
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp

from unskew.analytics.core.layout import Layout, Pipeline
from unskew.analytics.core.plan import PlanError, split_evenly
from unskew.analytics.planners.malleus_templates import Kind, Template, TemplateSearch
from unskew.analytics.planners.problem import Floats, PlannerCluster, layer_limits

WHOLE_BELOW = 1.2
REPLAN_AT = 0.3
TO_THE_END = {"mip_rel_gap": 0.0}
"""Without it HiGHS is content with what is 0.01 % from the best."""


class Group(msgspec.Struct, frozen=True):
    """Devices (numbers) that work as one, and their rate: time of a layer over that of a healthy group of nominal degree."""

    devices: tuple[int, ...]
    rate: float

    @property
    def kind(self) -> Kind:
        return self.rate, len(self.devices)


class MalleusPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The pipelines of its groups; groups and pipelines without work are left out.

    `objective` = max over pipelines of (slowest stage x micro-batches), in layers of a healthy group.
    """

    layout: Layout
    objective: float


def rates(speeds: Floats) -> Floats:
    """Straggling rates: 1 / speed, inf for dead devices, 1.0 where it is below the threshold."""
    with np.errstate(divide="ignore"):
        found = np.where(speeds > 0, 1.0 / np.where(speeds > 0, speeds, 1.0), np.inf)
    return np.where(found < WHOLE_BELOW, 1.0, found)


def must_replan(before: Floats, now: Floats) -> bool:
    """Did some device's straggling rate move by at least 0.3, or die, or come back?"""
    changed = np.isinf(before) != np.isinf(now)
    both = np.isfinite(before) & np.isfinite(now)
    return bool(changed.any() or (np.abs(before[both] - now[both]) >= REPLAN_AT).any())


def cut_node(
    devices: Sequence[int], rate_of: Sequence[float], alpha: Sequence[float], *, for_memory: bool = False
) -> list[Group]:
    """The groups of a node; `alpha[k]` the slow-down of a layer on k devices, k = 1..tp; `for_memory`: as many devices as
    can be used, however slow."""
    tp = len(alpha) - 1
    order = sorted((d for d in devices if np.isfinite(rate_of[d])), key=lambda d: (rate_of[d], d))
    n_whole = max(0, (len(order) - 1) // tp)

    def group(members: Sequence[int]) -> Group:
        return Group(tuple(sorted(members)), alpha[len(members)] * max(rate_of[d] for d in members))

    whole = [group(order[i * tp : (i + 1) * tp]) for i in range(n_whole)]
    rest = order[n_whole * tp :]
    best: tuple[float, list[Group]] = (0.0, [])
    used = 0
    for sizes in _cuts(tp, len(rest)):
        for arrangement in sorted(set(permutations(sizes)), reverse=True):
            ends = np.cumsum([0, *arrangement]).tolist()
            groups = [group(rest[a:b]) for a, b in pairwise(ends)]
            throughput = sum(1.0 / entry.rate for entry in groups)
            more = sum(sizes) - used if for_memory else 0
            if more > 0 or (more == 0 and throughput > best[0] * (1 + 1e-9)):
                best, used = (throughput, groups), sum(sizes)
    return whole + best[1]


def _cuts(tp: int, n: int) -> list[tuple[int, ...]]:
    """One whole group, or descending powers of two from each smaller size on, as far as n devices reach."""
    found: list[tuple[int, ...]] = [(tp,)] if n >= tp else []
    size = tp // 2
    while size >= 1:
        sizes, left, part = [], n, size
        while part >= 1:
            if part <= left:
                sizes.append(part)
                left -= part
            part //= 2
        if sizes:
            found.append(tuple(sizes))
        size //= 2
    return found


def layers_of(group_rates: Sequence[float], n_layers: int, limits: Sequence[int] = ()) -> tuple[list[int], float]:
    """ILP 1: (layers, slowest stage) with ``min max y l``; `limits`: the most layers that each group can hold."""
    n = len(group_rates)
    most = [min(n_layers, limit) for limit in limits] if limits else [n_layers] * n
    if sum(most) < n_layers:
        raise PlanError(f"{n_layers} layers do not fit groups that hold at most {most}")
    highest = n_layers * max(group_rates)
    solution = milp(
        c=np.array([1.0, *[1e-6 / highest * rate for rate in group_rates]]),
        integrality=np.array([0] + [1] * n),
        bounds=Bounds(np.zeros(n + 1), np.array([np.inf, *most])),
        constraints=[
            LinearConstraint(np.array([[0.0] + [1.0] * n]), n_layers, n_layers),
            LinearConstraint(np.column_stack([-np.ones(n), np.diag(group_rates)]), -np.inf, 0.0),
        ],
        options=TO_THE_END,
    )
    layers = [round(value) for value in solution.x[1:]]
    return layers, max(rate * count for rate, count in zip(group_rates, layers, strict=True))


def micro_batches_of(slowest: Sequence[float], stages: Sequence[int], micro_batches: int) -> tuple[list[int], float]:
    """ILP 2: (micro-batches, objective) with ``min max o m`` and at least as many micro-batches as stages."""
    n = len(slowest)
    least = list(stages) if sum(stages) <= micro_batches else [1] * n
    solution = milp(
        c=np.array([1.0] + [0.0] * n),
        integrality=np.array([0] + [1] * n),
        bounds=Bounds(np.array([0.0, *least]), np.array([np.inf] + [micro_batches] * n)),
        constraints=[
            LinearConstraint(np.array([[0.0] + [1.0] * n]), micro_batches, micro_batches),
            LinearConstraint(np.column_stack([-np.ones(n), np.diag(slowest)]), -np.inf, 0.0),
        ],
        options=TO_THE_END,
    )
    if solution.x is None:
        raise PlanError(f"{micro_batches} micro-batches cannot feed {n} pipelines")
    counts = [round(value) for value in solution.x[1:]]
    return counts, max(one * count for one, count in zip(slowest, counts, strict=True))


def plan_malleus(cluster: PlannerCluster) -> MalleusPlan:
    """Malleus' plan for the cluster as it is. Raises `PlanError` when the layers do not fit what is left."""
    job, whole = cluster.job, (1.0, cluster.tp)
    for for_memory in (False, True):
        groups = _groups(cluster, for_memory=for_memory)
        for used, pipelines in _fallbacks(groups, cluster.dp):
            search = TemplateSearch(
                [group.kind for group in used], whole, pipelines=pipelines, n_layers=job.n_layers,
                micro_batches=job.micro_batches, limits=None if job.capacity_bytes is None else lambda k: _limits(cluster, k),
            )  # fmt: skip
            if (best := search.best()) is not None:
                return _plan(cluster, used, best[1])
    raise PlanError(f"the {job.n_layers} layers do not fit the groups that are left: a checkpoint is needed")


def _groups(cluster: PlannerCluster, *, for_memory: bool) -> list[Group]:
    """All groups of all nodes, the largest first, of these the fastest."""
    rate_of = rates(cluster.speeds).ravel()
    alpha = [0.0, *(float(cluster.rates[-1] / cluster.rates[k]) for k in range(1, cluster.tp + 1))]
    nodes = cluster.nodes.ravel() if cluster.nodes is not None else np.arange(rate_of.size) // cluster.tp
    groups: list[Group] = []
    for devices in np.split(np.argsort(nodes, kind="stable"), np.flatnonzero(np.diff(np.sort(nodes))) + 1):
        groups += cut_node(devices.tolist(), rate_of.tolist(), alpha, for_memory=for_memory)
    return sorted(groups, key=lambda group: (-len(group.devices), group.rate, group.devices))


def _fallbacks(groups: Sequence[Group], dp: int) -> Iterator[tuple[Sequence[Group], int]]:
    """(groups, pipelines) in the order in which they are tried: all groups in as many pipelines as possible, then one pipeline
    without the smallest ones, whose activations may leave more room for layers."""
    for pipelines in range(min(dp, len(groups)), 0, -1):
        yield groups, pipelines
    for count in range(len(groups) - 1, 0, -1):
        yield groups[:count], 1


def _plan(cluster: PlannerCluster, groups: Sequence[Group], template: Template) -> MalleusPlan:
    """The template with its layers and micro-batches by the two programs, and with devices."""
    job, whole = cluster.job, (1.0, cluster.tp)
    known: dict[tuple[Kind, ...], tuple[list[int], float]] = {}
    for part in set(template):
        limits = [] if job.capacity_bytes is None else _limits(cluster, [degree for _, degree in part])
        known[part] = layers_of([rate for rate, _ in part], job.n_layers, limits)
    slowest = [known[part][1] for part in template]
    counts, objective = micro_batches_of(slowest, [len(part) for part in template], job.micro_batches)
    layers = [known[part][0] for part in template]
    slow = sorted((group for group in groups if group.kind != whole), key=lambda group: (-group.rate, group.devices))
    pipelines = fill(cluster, template, layers, slow, [group for group in groups if group.kind == whole])
    return MalleusPlan(layout=_layout(pipelines, layers, counts), objective=objective)


def _layout(pipelines: Sequence[Sequence[Group]], layers: Sequence[Sequence[int]], counts: Sequence[int]) -> Layout:
    found = []
    for number, (groups, sizes, count) in enumerate(zip(pipelines, layers, counts, strict=True)):
        used = [(group.devices, n) for group, n in zip(groups, sizes, strict=True) if n]
        if used and count:
            found.append(Pipeline(number, tuple(devices for devices, _ in used), tuple(n for _, n in used), count))
    return Layout(tuple(found))


def _limits(cluster: PlannerCluster, degrees: Sequence[int]) -> list[int]:
    """The most layers that each group of a pipeline can hold, at least 0 and at most all."""
    job, stages = cluster.job, len(degrees)
    ends_bytes = np.zeros(stages)
    ends_bytes[0] += job.ends_bytes[0]
    ends_bytes[-1] += job.ends_bytes[1]
    return [int(most) for most in layer_limits(job, np.array(degrees), stages - np.arange(stages), ends_bytes)]


def fill(
    cluster: PlannerCluster,
    template: Template,
    layers: Sequence[Sequence[int]],
    slow: Sequence[Group],
    whole: Sequence[Group],
) -> tuple[tuple[Group, ...], ...]:
    """Concrete groups for the template's places, so that as few layers as possible travel."""
    waiting: dict[Kind, list[Group]] = {}
    for group in slow:
        waiting.setdefault(group.kind, []).append(group)
    places = [(i, j) for i, part in enumerate(template) for j in range(len(part))]
    chosen: dict[tuple[int, int], Group] = {}
    for i, j in places:
        if queue := waiting.get(template[i][j]):
            nearest = next((n for n, group in enumerate(queue) if _home(cluster, group)[0] == i), 0)
            chosen[i, j] = queue.pop(nearest)
    own: dict[int, list[Group]] = {}
    for group in whole:
        own.setdefault(_home(cluster, group)[0], []).append(group)
    for i, part in enumerate(template):
        here = [(i, j) for j in range(len(part)) if (i, j) not in chosen]
        _match(cluster, here, own.get(i, []), layers, chosen)
    taken = set(chosen.values())
    left = [group for group in whole if group not in taken]
    _match(cluster, [place for place in places if place not in chosen], left, layers, chosen)
    return tuple(tuple(chosen[i, j] for j in range(len(part))) for i, part in enumerate(template))


def _match(
    cluster: PlannerCluster,
    places: Sequence[tuple[int, int]],
    groups: Sequence[Group],
    layers: Sequence[Sequence[int]],
    chosen: dict[tuple[int, int], Group],
) -> None:
    """Places to groups with the most overlap of old and new layers in all (the assignment problem)."""
    if not places or not groups:
        return
    overlap = np.zeros((len(places), len(groups)))
    for row, (i, j) in enumerate(places):
        first, end = sum(layers[i][:j]), sum(layers[i][: j + 1])
        for column, group in enumerate(groups):
            old_first, old_end = _home(cluster, group)[1]
            shared = max(0, min(end, old_end) - max(first, old_first))
            overlap[row, column] = shared / max(1, max(end, old_end) - min(first, old_first))
    for row, column in zip(*linear_sum_assignment(overlap, maximize=True), strict=True):
        chosen[places[row]] = groups[column]


def _home(cluster: PlannerCluster, group: Group) -> tuple[int, tuple[int, int]]:
    """(replica, range of layers) that the group's first device held at the start."""
    replica, stage = divmod(group.devices[0] // cluster.tp, cluster.pp)
    ends = np.cumsum([0, *split_evenly(cluster.job.n_layers, cluster.pp)]).tolist()
    return replica, (ends[stage], ends[stage + 1])
