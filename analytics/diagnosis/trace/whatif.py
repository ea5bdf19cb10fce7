"""What would the iterations have cost if ...: slowdown, whose it is, and three questions, by replay (ByteDance, OSDI'25).

With T the mean time of the replay without launch delays and T_ideal that of all operations at the ideal of their kind:

* slowdown S = T / T_ideal, per iteration as well;
* S_x = mean time with only group x at its real durations, all others ideal, over T_ideal; x is a replica, a stage, a kind;
  a worker's is the lesser of its replica's and its stage's;
* M_W = (T - T') / (T - T_ideal), T' with the slowest 3 % of the workers (at least one) at ideal durations; M_S: the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import msgspec
import numpy as np
from numpy.typing import NDArray

from unskew.analytics.diagnosis.trace.replay import TraceRecording, ideal_us, makespan_us, take_apart
from unskew.analytics.diagnosis.trace.scenarios import balanced_lengths, equal_stages, healthy_device
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.pipeline.dag import Array

WORST_SHARE = 0.03
LEAST_SLOWDOWN = 1.03
"""Below it there is nothing to attribute: M_W and M_S would divide noise by noise."""
SHOWN = 16
MOST_NUMBERS = 1 << 23  # in one pass: memory does not grow with the number of replicas times that of their operations
Mask = NDArray[np.bool_]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Times are means over the iterations (us); `simulator_error` is the mean of |replay without launch delays / measured - 1|.

    `m_w`, `m_s` are None below a slowdown of `LEAST_SLOWDOWN`, `m_s` also where there is one stage only.
    """

    measured_us: float
    replayed_us: float
    ideal_us: float
    simulator_error: float
    slowdown: float
    iteration_slowdown: dict[int, float]
    replica_slowdown: dict[int, float]
    stage_slowdown: dict[int, float]
    kind_slowdown: dict[str, float]
    worker_slowdown: dict[int, float]
    m_w: float | None
    m_s: float | None


def what_if(recording: TraceRecording) -> WhatIf:
    """The analysis of a recording: two replays for the slowdown, one more with a scenario for each group to attribute to."""
    graph, work = recording.graph, take_apart(recording).work_us
    ideal = ideal_us(recording, work)
    real = makespan_us(graph, work)
    best = makespan_us(graph, ideal)
    slowdown = float(real.mean() / best.mean())
    replicas, stages = (sorted({getattr(o, name) for o in graph.operations}) for name in ("replica", "stage"))
    groups = [
        *(graph.where(replica=replica) for replica in replicas),
        *(graph.where(stage=stage) for stage in stages),
        *(graph.where(kind=kind) for kind in graph.kinds),
    ]
    alone = iter(_means(recording, ideal, work, groups) / best.mean())
    of_replica = {replica: float(next(alone)) for replica in replicas}
    of_stage = {stage: float(next(alone)) for stage in stages}
    of_kind = {kind: float(next(alone)) for kind in graph.kinds}
    place = {o.rank: (o.replica, o.stage) for o in graph.operations}
    of_worker = {rank: min(of_replica[replica], of_stage[stage]) for rank, (replica, stage) in sorted(place.items())}
    m_w = m_s = None
    if slowdown >= LEAST_SLOWDOWN:
        count = ceil(WORST_SHARE * len(of_worker))
        worst = sorted(of_worker, key=lambda rank: (-of_worker[rank], rank))[:count]
        wanted = [np.logical_or.reduce([graph.where(rank=rank) for rank in worst])]
        wanted += [graph.where(stage=stages[-1])] if len(stages) > 1 else []
        shares = [float((real.mean() - t) / (real.mean() - best.mean())) for t in _means(recording, work, ideal, wanted)]
        m_w, m_s = shares[0], shares[1] if len(stages) > 1 else None
    return WhatIf(
        measured_us=float(recording.iteration_us.mean()),
        replayed_us=float(real.mean()),
        ideal_us=float(best.mean()),
        simulator_error=float(np.abs(real / recording.iteration_us - 1).mean()),
        slowdown=slowdown,
        iteration_slowdown=dict(zip(recording.iterations, (real / best).tolist(), strict=True)),
        replica_slowdown=of_replica,
        stage_slowdown=of_stage,
        kind_slowdown=of_kind,
        worker_slowdown=of_worker,
        m_w=m_w,
        m_s=m_s,
    )


def _means(recording: TraceRecording, base: Array, other: Array, groups: list[Mask]) -> Array:
    """Mean iteration times when each of the groups in turn has the durations of `other`, the rest those of `base`: [group]."""
    at_once = max(1, MOST_NUMBERS // max(base.size, 1))
    means = []
    for first in range(0, len(groups), at_once):
        some = groups[first : first + at_once]
        mixed = np.repeat(base[:, None, :], len(some), axis=1)
        for scenario, group in enumerate(some):
            mixed[group, scenario] = other[group]
        means.append(makespan_us(recording.graph, mixed).mean(axis=1))
    return np.concatenate(means)


class WhatIfResult(msgspec.Struct, frozen=True, kw_only=True):
    """Mean iteration of the replay under a change (us), and what that saves of the replay without it, in percent."""

    what: str
    iteration_us: float
    saves_percent: float


def ask(section: TraceSection, *, ranks: Sequence[int] = (), equal: bool = False, balanced: bool = False) -> list[WhatIfResult]:
    """What the iterations would have cost with each of the changes alone, and with all of them when there are several.

    Raises `ValueError` for a rank that the section does not have.
    """
    changes: list[tuple[str, Callable[[Array], Array]]] = []
    for rank in ranks:
        if rank not in section.ranks:
            known = section.ranks
            some = f"{', '.join(map(str, known[:SHOWN]))}{f', ... {known[-1]}' if len(known) > SHOWN else ''}"
            raise ValueError(f"rank {rank} has no part in it, allowed: {some}")
        changes.append((f"rank {rank} were as fast as its peers", partial(healthy_device, section, rank=rank)))
    if balanced:
        changes.append(("micro-batches carried equal work", partial(balanced_lengths, section)))
    if equal:
        changes.append(("stages were equal", partial(equal_stages, section)))
    work = section.parts.work_us
    before = float(makespan_us(section.recording.graph, work).mean())

    def answer(what: str, changed: Array) -> WhatIfResult:
        after = float(makespan_us(section.recording.graph, changed).mean())
        return WhatIfResult(what=what, iteration_us=after, saves_percent=100 * (1 - after / before))

    answers = [answer(what, change(work)) for what, change in changes]
    if len(changes) > 1:
        for _, change in changes:
            work = change(work)
        answers.append(answer("all of these", work))
    return answers
