"""Policies on real ranks, ours and published ones, against the same policies in the simulator: one scenario, the same object,
two worlds.

The live run is on the virtual device: real processes and plans, emulated chunk times; its documents fill a micro-batch each,
as those of the simulator's jobs do. Its job in the simulator has the costs that the run's own predictor had learned before the
first fault. Compared are the iterations at the end of each phase, when policy and detector have come to rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import msgspec

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.layout import to_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.lab.simulator.outcome import SimulationOutcome
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.loop.by_policy.view import job_of
from unskew.analytics.policies.registry import policy
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun
from unskew.collector.events import AdaptationStarted, MicroBatchPacked, PlanApplied, PredictorFitted
from unskew.runtime.options import RunOptions

POLICIES = ("unskew", "recycle", "oobleck", "malleus", "ntp", "resihp", "resihp-tp", "recover", "greyhound", "adaptra")
FIRST, APART, LAST = 20, 30, 10
"""The first fault is in this iteration, the next and the end come so many later; the last ones of a phase are compared."""
PHASE_S = 3600.0
DOCUMENTS = 64
MOST_PERCENT = 5.0
VIRTUAL = msgspec.structs.replace(EIGHT_RANKS, device="virtual")
OF_GROUPS = {"ntp": msgspec.structs.replace(VIRTUAL, tp=2, pp=2, heads=2, dim=32)}
"""A policy that is about groups: PP2 x DP2 x TP2. Its scenarios are of the other replica, whose hurt group it moves."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`kinds`: kill or slow, one fault a phase, of these `ranks`."""

    name: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    factor: float = 2.5

    @property
    def faults(self) -> list[str]:
        """For `unskew run`."""
        each = zip(self.kinds, self.ranks, range(FIRST, 10**6, APART), strict=False)
        return [f"{kind}:rank={rank},at={at}" + (f",factor={self.factor}" if kind == "slow" else "") for kind, rank, at in each]

    @property
    def cluster_events(self) -> list[ClusterEvent]:
        """For the simulator."""
        return [
            ClusterEvent(kind="failed", at_s=PHASE_S * phase, devices=(rank,))
            if kind == "kill"
            else ClusterEvent(kind="slowed", at_s=PHASE_S * phase, devices=(rank,), speed=1 / self.factor)
            for phase, (kind, rank) in enumerate(zip(self.kinds, self.ranks, strict=True), start=1)
        ]


SCENARIOS = (
    Scenario(name="a slow rank", kinds=("slow",), ranks=(1,)),
    Scenario(name="a death", kinds=("kill",), ranks=(1,)),
    Scenario(name="a death, then a slow rank", kinds=("kill", "slow"), ranks=(1, 6)),
)


class TwoWorlds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an iteration at the end of each phase, the healthy one first; whether the last plans are one."""

    live_s: tuple[float, ...]
    simulated_s: tuple[float, ...]
    same_plan: bool

    @property
    def worst_percent(self) -> float:
        """The largest difference of a phase."""
        pairs = zip(self.live_s, self.simulated_s, strict=True)
        return max(100.0 * abs(live / simulated - 1.0) for live, simulated in pairs)


def figures(bench: Bench, policies: Sequence[str] = POLICIES, scenarios: Sequence[Scenario] = SCENARIOS) -> Iterator[Figure]:
    """A row for each policy and scenario."""
    pairs = [(name, scenario) for name in policies for scenario in scenarios]
    for name, case in bench.steps("policies, live and simulated", pairs):
        base, scenario = OF_GROUPS.get(name, VIRTUAL), _elsewhere(case) if name in OF_GROUPS else case
        title = f"{name}, {scenario.name}: iterations live against simulated, largest difference of a phase"
        found = compared(bench, name, scenario, base)
        if isinstance(found, str):
            yield figure(title, None, "%", bar=MOST_PERCENT, better="lower", note=found)
            continue
        phases = ", ".join(f"{a:.3f} and {b:.3f} s" for a, b in zip(found.live_s, found.simulated_s, strict=True))
        plans = "one plan in the end" if found.same_plan else "not the same plan in the end"
        yield figure(
            title, found.worst_percent, "%", bar=MOST_PERCENT, better="lower", note=f"virtual device; {phases}; {plans}"
        )


def _elsewhere(scenario: Scenario) -> Scenario:
    """The same in the other replica."""
    return msgspec.structs.replace(scenario, ranks=tuple((rank + 4) % 8 for rank in scenario.ranks))


def compared(bench: Bench, name: str, scenario: Scenario, base: RunOptions = VIRTUAL) -> TwoWorlds | str:
    """One scenario in both worlds, or why the run does not say."""
    iterations = FIRST + APART * len(scenario.kinds)
    corpus = bench.store.root / "long_documents"
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / "text").write_text("".join(chr(97 + (7 * place) % 26) for place in range((base.tokens + 1) * DOCUMENTS)))
    options = msgspec.structs.replace(base, policy=name, iterations=iterations, corpus=str(corpus))
    run = bench.run(options, *scenario.faults)
    if run.failure:
        return run.failure
    ends = range(FIRST, iterations + 1, APART)
    live_s = tuple(fmean(run.summary.iteration_s[end - LAST : end]) for end in ends)
    job = job_like(run)
    outcome = played(job, name, scenario)
    simulated_s = tuple(_at(outcome, PHASE_S * (phase + 1)) for phase in range(len(ends)))
    layout = next((one.reaction.layout for one in reversed(outcome.answers)), None)
    last = Plan.from_data(run.of(PlanApplied)[-1].plan)
    digest = last.digest if layout is None else to_plan(layout, job.n_layers).digest
    return TwoWorlds(live_s=live_s, simulated_s=simulated_s, same_plan=digest == last.digest)


def job_like(run: FinishedRun) -> Job:
    """The run's job, by what its predictor knew before the first fault."""
    site = run.of(AdaptationStarted)[0].site
    origin = Plan.from_data(run.of(PlanApplied)[0].plan)
    fitted = [one for one in run.of(PredictorFitted) if one.watermark <= FIRST][-1]
    works = [work_of(one.lengths) for one in run.of(MicroBatchPacked)]
    model = msgspec.convert(fitted.model, CostModel)
    return job_of(origin, tuple(site["layer_bytes"]), model, works, units=site.get("units", 1))


def played(job: Job, name: str, scenario: Scenario) -> SimulationOutcome:
    """The scenario in the simulator, without noise; its detector finds what there is and measures it exactly, as the live one
    does on a virtual device. Who restarts from checkpoints has one in each phase, or what came before would not count."""
    chosen = policy(name)
    chosen.slow_recall = 1.0
    chosen.checkpoint_s = PHASE_S / 4 if chosen.checkpoint_s is not None else None
    hours = PHASE_S * (1 + len(scenario.kinds)) / 3600.0
    return simulate(job, chosen, scenario.cluster_events, SimulationOptions(hours=hours, noise_cv=0.0, speed_error=0.0))


def _at(outcome: SimulationOutcome, end_s: float) -> float:
    """The iteration that was running just before `end_s`."""
    begun = [one for one in outcome.segments if one.start_s[0] < end_s - PHASE_S / 2]
    return float(begun[-1].seconds[-1])
