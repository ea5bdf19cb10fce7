"""The events that a simulated job's run consists of, as a real job writes them.

A rank of the log represents a TP group: ``replica * PP + stage``, PP of the longest pipeline. It is lost whenever one of its
devices is, and joins again when it has all of them back: repaired, or replaced by a spare. The clock is virtual; the training
loss is the Chinchilla law's for the tokens so far (Hoffmann et al. 2022, equation 10): nothing is trained.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job, healthy
from unskew.analytics.core.layout import to_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.lab.simulator.hardware import FATAL
from unskew.analytics.lab.simulator.outcome import PolicyAnswer, SimulationOutcome
from unskew.analytics.policies.base import WAITING
from unskew.collector.events import (
    Control,
    DeviceJoined,
    DeviceLost,
    FaultInjected,
    IterationCommitted,
    IterationJudged,
    Party,
    PlanApplied,
    PlanProposed,
    Regrouped,
    RunFinished,
    Verdict,
    VerdictClosed,
)

_FAULTS = {"failed": "kill", "maintenance": "kill", "slowed": "slow"}


def finished(outcome: SimulationOutcome) -> RunFinished:
    """The run's last event."""
    aborted = outcome.aborted_s is not None
    ended = "stopped: no plan serves what is left" if aborted else "the hours asked for are over"
    return RunFinished(status="failed" if aborted else "done", iterations=outcome.iterations, reason=ended)


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """``1.69 + 406.4 / N^0.34 + 410.7 / D^0.28`` nats per token.

    >>> round(chinchilla_loss(70e9, 1.4e12), 2)
    1.94
    """
    return float(1.69 + 406.4 / parameters**0.34 + 410.7 / max(tokens, 1.0) ** 0.28)


def control_events(outcome: SimulationOutcome, cluster_events: Sequence[ClusterEvent]) -> Iterator[Control]:
    """What the controller would log between the run's start and its end, in order of time."""
    job = outcome.job
    layouts = [answer.reaction.layout for answer in outcome.answers if answer.reaction.layout is not None]
    width = max([job.pp, *(len(pipeline.layers) for layout in layouts for pipeline in layout.pipelines)])
    for rank in _ranks(job, range(0, job.devices, job.tp), width):
        yield _joined(job, rank, width)
    yield _applied(to_plan(healthy(job).by_group(width=width), job.n_layers), reason="the first plan")
    at = _iteration_at(outcome)
    entries: list[tuple[float, list[Control]]] = [
        (event.at_s, _truth(job, width, event, at(event.at_s))) for event in cluster_events
    ]
    crew = _Crew(job, width)
    entries += [
        (
            answer.at_s,
            [*_verdict(job, width, number, answer), *crew.lost_and_joined(answer), *_plan(job, width, number, answer)],
        )
        for number, answer in enumerate(outcome.answers)
    ]
    entries += _closings(outcome, cluster_events, at)
    for _, events in sorted(entries, key=lambda entry: entry[0]):
        yield from events


def _closings(
    outcome: SimulationOutcome, cluster_events: Sequence[ClusterEvent], at: Callable[[float], int]
) -> Iterable[tuple[float, list[Control]]]:
    """A slow phase's verdict ends when one of its devices is healthy again, or dead."""
    begun = [(answer.at_s, number, set(answer.event.devices)) for number, answer in enumerate(outcome.answers)
             if answer.event.kind == "slowed"]  # fmt: skip
    for event in sorted(cluster_events, key=lambda one: one.at_s):
        if event.kind not in {"recovered", "joined", *FATAL}:
            continue
        ended = [number for at_s, number, devices in begun if at_s <= event.at_s and not devices.isdisjoint(event.devices)]
        begun = [entry for entry in begun if entry[1] not in ended]
        iteration, reason = at(event.at_s), "healthy again" if event.kind in {"recovered", "joined"} else "the device is lost"
        if ended:
            yield (
                event.at_s,
                [
                    VerdictClosed(verdict=number, until_iteration=iteration, at_iteration=iteration, reason=reason)
                    for number in ended
                ],
            )


def _truth(job: Job, width: int, event: ClusterEvent, iteration: int) -> list[Control]:
    if event.kind not in _FAULTS:
        return []
    ranks = _ranks(job, event.devices, width)
    kind: Literal["slow", "kill"] = "slow" if event.kind == "slowed" else "kill"
    factor = 1.0 / event.speed if event.speed else None
    return [FaultInjected(kind=kind, rank=rank, at_iteration=iteration, factor=factor) for rank in ranks]


def _verdict(job: Job, width: int, number: int, answer: PolicyAnswer) -> Iterator[Control]:
    event, ranks = answer.event, _ranks(job, answer.event.devices, width)
    if event.kind not in _FAULTS or not ranks:
        return
    slow = event.kind == "slowed"
    yield Verdict(
        verdict=number, cause="slow_device" if slow else "dead",
        culprits=tuple(Party(kind="device", rank=rank) for rank in ranks),
        speed={"F": event.speed, "B": event.speed} if event.speed else {}, since_iteration=answer.iteration,
        at_iteration=answer.iteration, confidence=1.0, evidence={"simulated": True, "answer": answer.reaction.reason},
        sentence=f"rank(s) {', '.join(map(str, ranks))} {'are slow' if slow else 'are lost'} (simulated)",
    )  # fmt: skip


class _Crew:
    """Which devices each TP group lacks, as the policy hears of it."""

    def __init__(self, job: Job, width: int) -> None:
        self._job, self._width = job, width
        self._absent: defaultdict[int, set[int]] = defaultdict(set)

    def lost_and_joined(self, answer: PolicyAnswer) -> Iterator[Control]:
        """Every group that loses devices now; every group that has got the last of its own back."""
        event = answer.event
        if event.kind in FATAL:
            us = int(answer.at_s * 1e6)
            for rank, devices in self._by_rank(event.devices):
                self._absent[rank] |= devices
                what = f"{event.why or event.kind}: device {', '.join(map(str, sorted(devices)))}"
                yield DeviceLost(
                    device=f"group-{rank}", rank=rank, how="exit", detail=what, detected_us=us, iteration=answer.iteration
                )
        back = {*answer.reaction.replaced, *(event.devices if event.kind == "joined" else ())}
        for rank, devices in self._by_rank(back):
            if absent := self._absent.pop(rank, None):
                if absent <= devices:
                    yield _joined(self._job, rank, self._width)
                else:
                    self._absent[rank] = absent - devices

    def _by_rank(self, devices: Iterable[int]) -> list[tuple[int, set[int]]]:
        found: defaultdict[int, set[int]] = defaultdict(set)
        for device in devices:
            found[_rank(self._job, device, self._width)].add(device)
        return sorted(found.items())


def _plan(job: Job, width: int, number: int, answer: PolicyAnswer) -> Iterator[Control]:
    """Proposal and plan, as the controller would log them."""
    layout = answer.reaction.layout
    if layout is None or layout == WAITING or not answer.acts:
        return
    plan = to_plan(layout.by_group(width=width), job.n_layers, plan_version=answer.plan_version)
    cost_us = int((answer.resumed_s - answer.at_s) * 1e6)
    before = None if math.isinf(answer.before_s) else int(answer.before_s * 1e6)
    gain = None if before is None or math.isinf(answer.predicted_s) else 100.0 * (1.0 - answer.predicted_s / answer.before_s)
    predicted = None if math.isinf(answer.predicted_s) else int(answer.predicted_s * 1e6)
    reason = answer.reaction.reason
    yield PlanProposed(
        proposal=f"p{number}", plan_version=answer.plan_version, digest=plan.digest, optional=before is not None, reason=reason,
        verdict=number if answer.event.kind in _FAULTS else None, plan=plan.to_data(), predicted_us=predicted,
        baseline_us=before, gain_percent=gain, cost_us=cost_us, payback_iterations=None, at_iteration=answer.iteration,
        change=reason,
    )  # fmt: skip
    yield _applied(plan, answer.iteration, proposal=f"p{number}", reason=reason)
    yield Regrouped(
        plan_version=answer.plan_version, iteration=answer.iteration, seconds=cost_us / 1e6, migrate_seconds=0.0, moved_bytes=0
    )


def _applied(plan: Plan, iteration: int = 0, *, proposal: str = "", reason: str = "") -> PlanApplied:
    return PlanApplied(
        plan_version=plan.plan_version,
        digest=plan.digest,
        proposal=proposal,
        iteration=iteration,
        reason=reason,
        plan=plan.to_data(),
    )


def _joined(job: Job, rank: int, width: int) -> DeviceJoined:
    node = job.node(job.device(*divmod(rank, width), 0))
    return DeviceJoined(device=f"group-{rank}", rank=rank, node=f"node-{node}", pid=0)


def _rank(job: Job, device: int, width: int) -> int:
    """The log's rank of a slot: ``replica * width + stage`` of its home."""
    replica, stage = job.home(device)
    return replica * width + stage


def _ranks(job: Job, devices: Iterable[int], width: int) -> list[int]:
    return sorted({_rank(job, device, width) for device in devices})


def iterations(outcome: SimulationOutcome) -> Iterator[IterationCommitted | IterationJudged]:
    """What the ranks and the judge would log of each iteration."""
    job, tokens = outcome.job, 0.0
    for part in outcome.segments:
        share = part.micro_batches / job.micro_batches
        for offset, (start_s, seconds) in enumerate(zip(part.start_s.tolist(), part.seconds.tolist(), strict=True)):
            iteration, wall_us = part.first_iteration + offset, int(seconds * 1e6)
            tokens += share * job.tokens
            yield IterationCommitted(
                iteration=iteration,
                plan_version=part.plan_version,
                attempt=0,
                rank=0,
                loss=chinchilla_loss(job.parameters, tokens),
                tokens=int(share * job.tokens),
                start_us=int(start_s * 1e6),
                wall_us=wall_us,
                log_complete=True,
            )
            yield IterationJudged(
                iteration=iteration,
                plan_version=part.plan_version,
                measured_us=wall_us,
                predicted_us=int(part.predicted_s * 1e6),
            )


def _iteration_at(outcome: SimulationOutcome) -> Callable[[float], int]:
    """When (s) -> the iteration that runs then."""
    starts = [float(part.start_s[0]) for part in outcome.segments]

    def at(when_s: float) -> int:
        number = bisect_right(starts, when_s) - 1
        if number < 0:
            return 0
        part = outcome.segments[number]
        return part.first_iteration + int(np.searchsorted(part.start_s, when_s, side="right")) - 1

    return at
