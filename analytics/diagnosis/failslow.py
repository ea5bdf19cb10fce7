"""The Detector over a finished log: the code that runs live, fed with what the log holds."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.iteration import Chunk, CommittedIteration
from unskew.analytics.core.plan import Hop, Plan, Role, Route
from unskew.analytics.core.workload import Work
from unskew.analytics.detector.detector import Detector, Verdicts
from unskew.analytics.detector.options import EMULATED, SHARED_MACHINE, DetectorOptions
from unskew.analytics.detector.verdicts import devices
from unskew.analytics.detector.workers import judge_workers
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.section import KIND, TraceSection
from unskew.analytics.health.gpu_evidence import GpuHistory, remembered, with_gpu
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.predictor.retraining import IterationSample, Retraining, speeds_then, suspicion, turned
from unskew.collector.events import DeviceLost, Verdict, VerdictClosed

AS_EXPECTED = CostModel(chunks={kind: ChunkCost(layer_us=0.0, token_us=1.0, token2_us=0.0) for kind in "FBW"})
"""For chunks whose work is told as the microseconds that it should take."""


class FailSlowResult(msgspec.Struct, frozen=True):
    """Verdicts as they stand at the end, the last predictor (None when none could be fitted), and the complete iterations with
    what was believed of the devices in each."""

    verdicts: tuple[Verdict, ...]
    cost: CostModel | None
    seen: tuple[IterationSample, ...] = ()


def thresholds(log: RunLog) -> DetectorOptions:
    """Those of the run's class of device."""
    if log.emulated:
        return EMULATED
    return SHARED_MACHINE if log.on_cores else DetectorOptions()


def follow_run(log: RunLog) -> FailSlowResult:
    """One of our own runs again, iteration by iteration: predictors learned on the way, losses where the run saw them."""
    detector, retraining = Detector(thresholds(log)), Retraining(classes=log.classes)
    said: list[Verdict | VerdictClosed] = []
    opened: dict[int, Verdict] = {}
    seen: list[IterationSample] = []
    gpus: dict[int, GpuHistory] = {}
    losses = sorted(log.lost, key=lambda lost: lost.watermark or 0)
    plan_version = 0
    for released in log.released:
        committed, gpus = released.committed, remembered(gpus, released.gpus)
        while losses and (losses[0].watermark or 0) <= committed.iteration:
            said += _lost(detector, log, losses.pop(0), committed.iteration)
        plan = log.plans[committed.plan_version]
        if committed.plan_version != plan_version:
            plan_version = committed.plan_version
            retraining.plan_changed(committed.iteration)
        if not committed.log_complete:
            continue
        speeds, doubt = speeds_then(detector.speeds), 0.0
        found: Verdicts = ()
        if retraining.fitted is not None:
            judgement = detector.observe(committed, plan, retraining.fitted.model)
            doubt, found = suspicion(judgement.judged), judgement.verdicts
            said += (with_gpu(one, gpus) if isinstance(one, Verdict) else one for one in found)
        opened |= {one.verdict: one for one in found if isinstance(one, Verdict)}
        seen.append(IterationSample(released, plan, speeds, suspicion=doubt))
        retraining.observe(seen[-1])
        for rank, since in turned(found, opened).items():
            retraining.believed(rank, since, detector.speeds.get(rank, {}))
    last = log.released[-1].committed.iteration if log.released else 0
    for lost in losses:
        said += _lost(detector, log, lost, last)
    return FailSlowResult(settled(said), retraining.fitted.model if retraining.fitted else None, tuple(seen))


def _lost(detector: Detector, log: RunLog, lost: DeviceLost, iteration: int) -> Verdicts:
    """As the run saw it; in logs of old versions, which do not say, `iteration` and all that had a role beside it count."""
    with_it = [plan for plan in log.plans.values() if lost.rank in plan.ranks]
    others = tuple(rank for rank in with_it[-1].ranks if rank != lost.rank) if with_it else ()
    suspect = Suspect(rank=lost.rank, how=lost.how, detail=lost.detail, victims=lost.victims or others)
    return detector.lost(suspect, iteration if lost.iteration is None else lost.iteration)


def follow_section(section: TraceSection, options: DetectorOptions) -> tuple[Verdict, ...]:
    """A recording whose workload was inferred: every chunk against what its peers let expect."""
    recording, detector = section.recording, Detector(options)
    operations = recording.graph.operations
    chunks = [i for members in section.cells.values() for i in members]
    plan = _plan(section)
    work = section.parts.work_us
    said: list[Verdict | VerdictClosed] = []
    for column, iteration in enumerate(recording.iterations):
        done = tuple(
            Chunk(
                rank=operations[i].rank,
                kind=KIND[operations[i].kind],
                n_layers=1,
                has_head=False,
                work=Work(max(round(float(section.expected_us[i, column])), 1), 0),
                us=float(work[i, column]),
            )
            for i in chunks
        )
        committed = CommittedIteration(
            iteration=iteration, plan_version=0, chunks=done, works=tuple(Work(1, 0) for _ in range(len(plan.routes))),
            measured_us=float(recording.iteration_us[column]), log_complete=bool(np.isfinite(recording.iteration_us[column])),
        )  # fmt: skip
        said += detector.observe(committed, plan, AS_EXPECTED).verdicts
    return settled(said)


def follow_replicas(section: TraceSection, options: DetectorOptions) -> tuple[TraceSection, tuple[Verdict, ...]]:
    """A recording of one stage without lengths: a rank's forward and backward explain each other, so each rank's whole time is
    compared with the other ranks' and with its own past (workers.py). In the section returned a rank that was named is expected
    to take what it would take at its healthy speed."""
    operations, work = section.recording.graph.operations, section.parts.work_us
    mine = {rank: [i for of in section.cells.values() for i in of if operations[i].rank == rank] for rank in section.ranks}
    times = np.stack([work[of].sum(axis=0) for of in mine.values()], axis=1)
    said = settled(judge_workers(times, options, iterations=section.recording.iterations))
    expected, found = section.expected_us.copy(), []
    numbers = np.array(section.recording.iterations)
    for verdict in said:
        rank, speed = section.ranks[verdict.culprits[0].rank or 0], min(verdict.speed.values())
        until = verdict.until_iteration
        during = (numbers >= verdict.since_iteration) & (numbers < until if until is not None else True)
        expected[np.ix_(mine[rank], during)] *= speed
        found.append(
            msgspec.structs.replace(
                verdict,
                culprits=devices([rank]),
                victims=devices(set(section.ranks) - {rank}),
                speed=dict.fromkeys(section.kinds, speed),
                sentence=f"rank {rank} computes at {speed:.2f} of its healthy speed since iteration {verdict.since_iteration}",
            )
        )
    return msgspec.structs.replace(section, expected_us=expected), tuple(found)


def _plan(section: TraceSection) -> Plan:
    """Who does what in a recording: a layer a stage, so that peers are the ranks of a stage, mates those of a replica."""
    operations = section.recording.graph.operations
    place = {(o.replica, o.stage): o.rank for o in operations}
    replicas = sorted({replica for replica, _ in place})
    stages = sorted({stage for _, stage in place})
    roles = tuple(
        Role(rank=rank, replica=replica, stage=stage, first_layer=stages.index(stage), n_layers=1)
        for (replica, stage), rank in sorted(place.items())
    )
    routes = []
    batches = sorted({(o.replica, o.micro_batch) for o in operations if o.micro_batch is not None})
    for number, (replica, _) in enumerate(batches):
        hops = tuple(Hop(first_layer=i, n_layers=1, ranks=(place[replica, stage],)) for i, stage in enumerate(stages))
        routes.append(Route(micro_batch=number, replica=replicas.index(replica), hops=hops))
    return Plan(plan_version=0, n_layers=len(stages), schedule="1f1b", roles=roles, routes=tuple(routes))


def settled(said: Iterable[Verdict | VerdictClosed]) -> tuple[Verdict, ...]:
    """Each verdict as it was revised and closed in the end."""
    found: dict[int, Verdict] = {}
    for one in said:
        if isinstance(one, Verdict):
            found[one.verdict] = one
        elif one.verdict in found:
            found[one.verdict] = msgspec.structs.replace(found[one.verdict], until_iteration=one.until_iteration)
    return tuple(found.values())
