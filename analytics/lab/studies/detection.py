"""Synthetic jobs for detectors: ResiHP's protocol (table 5: many short jobs, half of them with one persistent fail-slow
that begins after the first and before the last 50 iterations), with the noise of noise.toml.

A job, from its seed alone: documents are drawn from a corpus's quantiles, cut at the context length and packed by next fit, as
in training; each chunk takes its cost times the device's factor, the chunk's factor and the fault's; the pipeline model
(pipeline/schedule.py) turns the chunks into iteration times. `run` shows the job to detectors and keeps their verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count

import msgspec
import numpy as np

from unskew.analytics.core.constants import constant
from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.iteration import Chunk, CommittedIteration, Transfer
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work, work_of
from unskew.analytics.detector.published.validation import Probe
from unskew.analytics.detector.residuals import Floats
from unskew.analytics.lab.studies.noise import Noise, chunk_factors, device_factors
from unskew.analytics.pipeline.prediction import durations_us, layer_costs, predict_iteration
from unskew.analytics.pipeline.schedule import Schedule, build_schedule, evaluate
from unskew.analytics.predictor.fit import TimedIteration, fit, fit_terms
from unskew.analytics.replay.method import Method, MethodInput
from unskew.collector.events import CHUNK_KINDS, Verdict, VerdictClosed

PROTECTED = 50  # no fault begins in the first or the last so many iterations
WARM_UP = 10  # iterations that fit the predictor
PROBE_SD = 0.02  # log; of a matrix product that is repeated (the noise of one healthy device between repeats)


class JobSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of job. `micro_batches` per replica; `tokens` is the context length; `hidden` the model's width."""

    pp: int
    tokens: int
    micro_batches: int
    hidden: int
    dp: int = 2
    n_layers: int = 32
    iterations: int = 200

    @property
    def name(self) -> str:
        return f"PP{self.pp}, {self.tokens // 1024}K"


SETTINGS = (
    JobSetting(pp=4, tokens=8_192, micro_batches=4, hidden=4_096),
    JobSetting(pp=4, tokens=16_384, micro_batches=8, hidden=5_120),
    JobSetting(pp=8, tokens=32_768, micro_batches=8, hidden=5_120),
)
"""ResiHP's table 4 for micro-batches per context length; widths of the 7B and 13B models."""

FLOPS = 4 * constant("peak_flops_a100") * 0.5  # of a tensor-parallel group of four A100 at half of their bfloat16 peak
VOCABULARY = 32_000


def cost_of(setting: JobSetting) -> CostModel:
    """Chunk costs from stated FLOPs: per layer 24 h^2 for a token and, causal, 2 h l^2 for a document of l tokens; 2 h V for a
    token in the head; backward twice the forward. A message of 300 us, an iteration's end of 40 ms."""
    hidden, us = setting.hidden, 1e6 / FLOPS
    forward = ChunkCost(
        layer_us=100.0,
        token_us=24 * hidden**2 * us,
        token2_us=2 * hidden * us,
        head_us_per_token=2 * hidden * VOCABULARY * us,
    )
    return CostModel(chunks={"F": forward, "B": forward.times(2)}, message_us=300.0, iteration_end_us=40_000.0)


class SlowFault(msgspec.Struct, frozen=True):
    """Chunks of `rank` take `factor` times as long from iteration `at` to the end."""

    rank: int
    factor: float
    at: int


class SyntheticJob(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One synthetic run: `works[k][m]`, chunk times [action of the schedule, iteration], iteration times [iteration] (us)."""

    plan: Plan
    works: tuple[tuple[Work, ...], ...]
    chunk_us: Floats
    measured_us: Floats
    fault: SlowFault | None
    probe_factors: Floats

    @property
    def iterations(self) -> int:
        return len(self.works)

    @cached_property
    def _schedule(self) -> Schedule:
        return build_schedule(self.plan)

    def committed(self, iteration: int) -> CommittedIteration:
        """The iteration as the log would give it."""
        works, times = self.works[iteration], self.chunk_us[:, iteration].tolist()
        n_layers = self.plan.n_layers
        chunks = tuple(
            Chunk(a.rank, a.kind, a.n_layers, a.first_layer + a.n_layers == n_layers, works[a.micro_batch], us)
            for a, us in zip(self._schedule.order, times, strict=True)
        )
        return CommittedIteration(
            iteration=iteration,
            plan_version=self.plan.plan_version,
            chunks=chunks,
            works=works,
            measured_us=float(self.measured_us[iteration]),
            log_complete=True,
        )

    def probe(self, iteration: int) -> Probe:
        """What a matrix product on some ranks would show in this iteration."""

        def measure(ranks: Sequence[int]) -> Mapping[int, float]:
            slow = {self.fault.rank: self.fault.factor} if self.fault and iteration >= self.fault.at else {}
            return {rank: float(self.probe_factors[iteration, rank]) * slow.get(rank, 1.0) for rank in ranks}

        return measure


def synthetic_job(setting: JobSetting, seed: int, noise: Noise, lengths: Floats, factor: float | None) -> SyntheticJob:
    """The job of this seed; `lengths` are quantiles of document lengths (tokens), `factor` None = no fault."""
    random = np.random.default_rng(seed)
    n = setting.iterations
    plan = uniform_plan(
        tp=1, pp=setting.pp, dp=setting.dp, n_layers=setting.n_layers, micro_batches=setting.micro_batches * setting.dp
    )
    works = _packed(setting, lengths, random, setting.micro_batches * setting.dp)
    schedule, cost = build_schedule(plan), cost_of(setting)
    chunk_us = durations_us(schedule, layer_costs(works, cost), {})
    devices = device_factors(noise, random, n, len(plan.ranks))
    rank = np.array([action.rank for action in schedule.order])
    kind = np.array([action.kind for action in schedule.order])
    chunk_us = chunk_us * devices.T[rank]
    for name in CHUNK_KINDS[:2]:
        # By chunk, not by place in the schedule: another order of the same work meets the same noise.
        mine = sorted(np.flatnonzero(kind == name), key=lambda i: (schedule.order[i].micro_batch, schedule.order[i].hop))
        chunk_us[mine] *= chunk_factors(noise, random, name, (len(mine), n))
    fault = None
    if factor is not None:
        at = int(random.integers(PROTECTED, n - PROTECTED))
        fault = SlowFault(int(random.integers(len(plan.ranks))), factor, at)
        chunk_us[rank == fault.rank, at:] *= factor
    measured_us = evaluate(schedule, chunk_us, cost.message_us).makespan_us + cost.iteration_end_us
    probes = devices * np.exp(random.normal(0, PROBE_SD, devices.shape))
    return SyntheticJob(plan=plan, works=works, chunk_us=chunk_us, measured_us=measured_us, fault=fault, probe_factors=probes)


def _packed(
    setting: JobSetting, lengths: Floats, random: np.random.Generator, micro_batches: int
) -> tuple[tuple[Work, ...], ...]:
    """Next fit of documents as they come, a longer one cut into pieces of the context length: [iteration][micro-batch]."""
    probabilities = np.linspace(0, 1, len(lengths))
    stream = (int(x) for _ in count() for x in np.exp(np.interp(random.random(4096), probabilities, np.log(lengths))))
    packed: list[Work] = []
    inside: list[int] = []
    room = setting.tokens
    while len(packed) < setting.iterations * micro_batches:
        left = next(stream)
        while left > 0:
            piece = min(left, setting.tokens)
            if piece > room:
                packed.append(work_of(inside))
                inside, room = [], setting.tokens
            inside.append(piece)
            room -= piece
            left -= piece
    return tuple(
        tuple(packed[first : first + micro_batches]) for first in range(0, setting.iterations * micro_batches, micro_batches)
    )


def warm_up(job: SyntheticJob) -> CostModel:
    """The predictor as training has it after the first iterations."""
    seen = [job.committed(iteration) for iteration in range(WARM_UP)]
    measured = [TimedIteration(job.plan, one.works, one.measured_us) for one in seen[1:]]

    def makespan_us(timed: TimedIteration, cost: CostModel) -> float:
        return predict_iteration(timed.plan, timed.works, cost).iteration_us

    return fit_terms(fit([chunk for one in seen for chunk in one.chunks]), measured, makespan_us, [Transfer(0, 1, 300.0)]).model


class DetectionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one detector reported about one job. Delay and onset error in iterations after the fault began, None = never named.

    `false_alarms`: alarms while nothing was wrong, or after the culprit was named, or that ended in naming somebody else;
    `flagged`: verdicts against healthy ranks; `speed_error`: estimated minus true speed of the culprit when it was named.
    """

    method: str
    factor: float | None
    named: bool
    delay: int | None
    onset_error: int | None
    speed_error: float | None
    false_alarms: int
    flagged: int = msgspec.field(name="accused")


def run(job: SyntheticJob, methods: Sequence[Callable[[], Method]]) -> list[DetectionOutcome]:
    """Show the job to fresh detectors, from the end of the warm-up on."""
    cost = warm_up(job)
    detectors = [method() for method in methods]
    notes = [_Notes(detector.name, job.fault) for detector in detectors]
    for iteration in range(WARM_UP, job.iterations):
        observed = MethodInput(committed=job.committed(iteration), plan=job.plan, cost=cost)
        probe = job.probe(iteration)
        for detector, note in zip(detectors, notes, strict=True):
            outcome = detector.observe(observed, probe)
            note.take(iteration, outcome.verdicts, alarmed=bool(outcome.alarm))
    return [note.outing() for note in notes]


def wilson(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927).

    >>> [round(bound, 3) for bound in wilson(10, 10)]
    [0.722, 1.0]
    """
    z2 = 1.96**2
    centre, spread = (hits + z2 / 2) / (n + z2), 1.96 * np.sqrt(hits * (n - hits) / n + z2 / 4) / (n + z2)
    return max(0.0, float(centre - spread)), min(1.0, float(centre + spread))


class _Notes:
    """Counts for one detector and one job."""

    def __init__(self, method: str, fault: SlowFault | None) -> None:
        self._method, self._fault = method, fault
        self._first: Verdict | None = None
        self._known: set[int] = set()
        self._false_alarms = self._flagged = 0

    def take(self, iteration: int, verdicts: Sequence[Verdict | VerdictClosed], *, alarmed: bool) -> None:
        fault = self._fault
        true = fault is not None and iteration >= fault.at
        named_before = self._first is not None
        hits = wrong = 0
        for verdict in verdicts:
            if not isinstance(verdict, Verdict):
                continue
            new, ranks = verdict.verdict not in self._known, {party.rank for party in verdict.culprits}
            self._known.add(verdict.verdict)
            if fault is not None and true and ranks == {fault.rank}:
                hits += 1
                self._first = self._first or verdict
            elif new:
                wrong += 1
        self._flagged += wrong
        if alarmed and (wrong or not (hits or (true and not named_before))):
            self._false_alarms += 1

    def outing(self) -> DetectionOutcome:
        fault, first = self._fault, self._first
        found = fault is not None and first is not None
        speed = sum(first.speed.values()) / len(first.speed) if first and first.speed else None
        return DetectionOutcome(
            method=self._method,
            factor=fault.factor if fault else None,
            named=found,
            delay=first.at_iteration - fault.at if fault and first else None,
            onset_error=first.since_iteration - fault.at if fault and first else None,
            speed_error=speed - 1 / fault.factor if fault and speed is not None else None,
            false_alarms=self._false_alarms,
            flagged=self._flagged,
        )
