"""Adaptra / PipeMorph (arXiv 2504.19232): extra warm-up forwards absorb slow links; slow compute is only reordered."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.core.constants import constant
from unskew.analytics.policies.base import ClusterView, Policy, Reaction


def warm_ups(delays_s: Sequence[float], forward_s: Sequence[float], micro_batches: int) -> list[int]:
    """Forwards of each stage before its first backward: ``w_last = 1``, ``w_i = w_{i+1} + ceil(delay_i / F_i) + 2`` when slow.

    A healthy link adds 1F1B's one. `delays_s[i]` is the delay of link i, i+1.

    >>> warm_ups([0.0, 2.5, 0.0], [1.0, 1.0, 1.0, 1.0], 16)
    [7, 6, 2, 1]
    """
    counts = [1]
    for delay, forward in zip(reversed(list(delays_s)), list(reversed(list(forward_s)))[1:], strict=True):
        counts.append(min(micro_batches, counts[-1] + (math.ceil(delay / forward) + 2 if delay > 0 else 1)))
    return counts[::-1]


def makespan_s(delays_s: Sequence[float], chunks_s: Sequence[tuple[float, float]], warm: Sequence[int], m: int) -> float:
    """The makespan of a pipeline whose links have their own delays: `chunks_s[s]` = (F, B) of stage s, `m` micro-batches.

    Each stage starts with `warm[s]` forwards, then runs whatever is ready, backward before forward; ``warm = S - s`` is 1F1B.

    >>> makespan_s([0.0], [(1.0, 2.0), (1.0, 2.0)], [2, 1], 4)
    15.0
    """
    stages = len(chunks_s)
    forward_s, backward_s = zip(*chunks_s, strict=True)
    forward_end = [[math.inf] * m for _ in range(stages)]
    backward_end = [[math.inf] * m for _ in range(stages)]
    free, next_f, next_b = [0.0] * stages, [0] * stages, [0] * stages
    for _ in range(2 * stages * m):
        best: tuple[float, int, int] | None = None
        for s in range(stages):
            options = []
            if next_b[s] < next_f[s]:
                given = forward_end[s][next_b[s]] if s == stages - 1 else backward_end[s + 1][next_b[s]] + delays_s[s]
                options.append((max(free[s], given), 0, s))
            if next_f[s] < m and next_f[s] - next_b[s] < warm[s]:
                given = 0.0 if s == 0 else forward_end[s - 1][next_f[s]] + delays_s[s - 1]
                options.append((max(free[s], given), 1, s))
            best = min([*options, *([best] if best else [])], default=None)
        assert best is not None
        start, is_forward, s = best
        if is_forward:
            free[s] = forward_end[s][next_f[s]] = start + forward_s[s]
            next_f[s] += 1
        else:
            free[s] = backward_end[s][next_b[s]] = start + backward_s[s]
            next_b[s] += 1
    return max(free)


class AdaptraPolicy(Policy):
    """Fail-stop is not handled: the job stops. In the simulator it does nothing else: a layout has the order of the evaluator,
    into which `warm_ups` cannot be put, so slow links are borne as by any policy (`makespan_s` has what extra forwards bring);
    messages block no kernels here, so the CPU-side RDMA path brings nothing; slow compute is borne as it is.
    """

    name = "adaptra"
    sees = frozenset({"failed", "maintenance", "slowed", "recovered", "link_slowed", "link_recovered"})
    slow_recall = constant("greyhound_slow_recall")

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        if cluster.dead() & cluster.layout.devices:
            return Reaction(layout=None, reason="a device is dead: Adaptra answers fail-slow only")
        return Reaction(layout=cluster.layout, redo="none", reason="order only")
