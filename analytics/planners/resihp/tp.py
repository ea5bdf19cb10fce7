"""TP level: which members of a tensor-parallel group work, which are on standby (ResiHP, section 6.1, eq. 3-4).

For the living members of a group, sorted by speed: ``score(k) = rate(k) x slowest of the k fastest``; the k with the largest
score wins, where k runs over the powers of two (ResiHP) or over all degrees (ours), from the smallest whose shard fits the
memory up to the nominal degree. ``rate(k)`` is k / tp in the paper, what was measured where a cluster has it.

Tie rule (the paper has none): of equal scores the larger degree, because it moves nothing; of equal speeds the lower shard.
Members left out are the standby of their node: groups of the node that fell short choose once more among their members and the
standby, the weakest group first.

>>> choose((1.0, 1.0, 1.0, 0.4), (0.0, 0.25, 0.5, 0.75, 1.0), powers_of_two=True)[0]
2
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from unskew.analytics.planners.problem import Bools, Floats, Ints, PlannerCluster

EPSILON = 1e-12


class TpGroups(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The groups after the TP level: `members` [dp, pp, tp] are device numbers, -1 = none, `speeds` and `degrees`
    [dp, pp]."""

    members: Ints
    speeds: Floats
    degrees: Ints

    @cached_property
    def guests(self) -> Bools:
        """[dp, pp, tp]: members that stood by in another group of their node."""
        dp, pp, tp = self.members.shape
        return np.asarray((self.members >= 0) & (self.members // tp != np.arange(dp * pp).reshape(dp, pp, 1)))


def degrees_allowed(tp: int, *, powers_of_two: bool) -> list[int]:
    """The degrees that may be chosen, ascending."""
    return [k for k in range(1, tp + 1) if not powers_of_two or k & (k - 1) == 0]


def choose(speeds: Sequence[float], rates: Sequence[float], *, powers_of_two: bool, least: int = 1) -> tuple[int, float]:
    """(degree, its score) for members of these speeds, fastest first; degree 0 when none is possible."""
    living = [speed for speed in speeds if speed > 0]
    allowed = degrees_allowed(len(rates) - 1, powers_of_two=powers_of_two)
    scores = {k: rates[k] * living[k - 1] for k in allowed if least <= k <= len(living)}
    if not scores:
        return 0, 0.0
    best = max(scores.values())
    degree = max(k for k, score in scores.items() if score >= best - EPSILON)
    return degree, scores[degree]


def exclude(cluster: PlannerCluster, *, powers_of_two: bool, least: Ints | int = 1) -> TpGroups:
    """The TP level for all groups at once. `least` [pp]: the smallest degree that fits the memory of each stage."""
    dp, pp, tp = cluster.speeds.shape
    rates = cluster.rates
    least_of = np.broadcast_to(np.asarray(least), (pp,))
    order = np.argsort(-cluster.speeds, axis=2, kind="stable")
    fastest = np.take_along_axis(cluster.speeds, order, axis=2)
    degrees = np.arange(1, tp + 1)
    allowed = np.isin(degrees, degrees_allowed(tp, powers_of_two=powers_of_two)) & (degrees >= least_of[:, None])
    scores = np.where(allowed[None] & (fastest > 0), rates[1:] * fastest, 0.0)
    best = scores.max(axis=2)
    chosen = tp - np.argmax(scores[:, :, ::-1] >= best[:, :, None] - EPSILON, axis=2)
    chosen = np.where(best > 0, chosen, 0)
    numbers = order + np.arange(dp * pp).reshape(dp, pp, 1) * tp
    members = np.where(np.arange(tp) < chosen[:, :, None], numbers, -1)
    groups = TpGroups(members=members, speeds=best, degrees=chosen.astype(np.int64))
    for (replica, stage), crew in _borrow(cluster, groups, powers_of_two, least_of).items():
        members[replica, stage] = [*crew, *[-1] * (tp - len(crew))]
        groups.degrees[replica, stage] = len(crew)
        best[replica, stage] = rates[len(crew)] * cluster.speeds.ravel()[crew[-1]]
    return groups


def _borrow(cluster: PlannerCluster, groups: TpGroups, powers_of_two: bool, least: Ints) -> dict[tuple[int, int], list[int]]:
    """Groups that choose again among members and standby of their node: (replica, stage) -> the members chosen."""
    if cluster.nodes is None:
        return {}
    speed = cluster.speeds.ravel()
    node_of = cluster.nodes.ravel()
    pp, tp = cluster.pp, cluster.tp
    idle = np.setdiff1d(np.flatnonzero(speed > 0), groups.members)
    short = np.argwhere(groups.speeds < cluster.rates[-1] - EPSILON)
    pools: dict[int, list[int]] = {}
    for device in idle.tolist():
        pools.setdefault(int(node_of[device]), []).append(device)
    result: dict[tuple[int, int], list[int]] = {}
    for replica, stage in sorted(map(tuple, short.tolist()), key=lambda group: (groups.speeds[group], group)):
        first = (replica * pp + stage) * tp
        node = int(node_of[first])
        own = [device for device in groups.members[replica, stage].tolist() if device >= 0]
        pool = pools.get(node, [])
        if not any(device not in range(first, first + tp) for device in pool):
            continue
        candidates = sorted({*own, *pool}, key=lambda device: (-speed[device], device not in own, device))
        degree, score = choose(
            [float(speed[device]) for device in candidates],
            cluster.rates.tolist(),
            powers_of_two=powers_of_two,
            least=int(least[stage]),
        )
        if degree and score > groups.speeds[replica, stage] + EPSILON:
            result[replica, stage] = candidates[:degree]
            pools[node] = candidates[degree:]
    return result
