"""What `unskew bench NAME` runs: the parts of each benchmark, all of them measured in one store.

Only the modules of the chosen one are imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unskew.benchmarks.runs import Part

SLOW = ("loop.slow.figures_of_a_strong_fault", "loop.slow.figures_of_a_weak_fault", "loop.slow.figures_on_cores")
BENCHES: dict[str, tuple[str, ...]] = {
    "loop": ("loop.kills.figures", *SLOW, "loop.outage.figures", "loop.overhead.figures", "loop.healthy.figures"),
    "kills": ("loop.kills.figures",),
    "slow": SLOW,
    "outage": ("loop.outage.figures",),
    "overhead": ("loop.overhead.figures",),
    "healthy": ("loop.healthy.figures",),
    "liveness": ("loop.liveness.figures",),
    "recovery_replicas": ("recovery.replicas.figures",),
    "recovery": (
        "recovery.in_step.figures",
        "recovery.replicas.figures",
        "recovery.resume.figures",
        "recovery.soak.figures",
        "recovery.joins.figures",
        "recovery.joins.figures_of_quiet_ranks",
        "recovery.torchft.figures",
    ),
    "recovery_in_step": ("recovery.in_step.figures",),
    "recovery_torchft": ("recovery.torchft.figures",),
    "recovery_quiet": ("recovery.joins.figures_of_quiet_ranks",),
    "runtime": (
        "runtime.links.figures_by_logical_clock",
        "runtime.links.figures",
        "runtime.links.figures_of_blocking_sends",
        "runtime.overlap.figures",
        "runtime.memory.figures",
        "runtime.tensor.figures",
        "runtime.executor.figures",
        "runtime.changes.figures",
    ),
    "runtime_memory": ("runtime.memory.figures",),
    "runtime_overlap": ("runtime.overlap.figures",),
    "runtime_virtual": ("runtime.links.figures_by_logical_clock",),
    "runtime_links": ("runtime.links.figures",),
    "runtime_blocking": ("runtime.links.figures_of_blocking_sends",),
    "recovery_resume": ("recovery.resume.figures",),
    "recovery_soak": ("recovery.soak.figures",),
    "recovery_joins": ("recovery.joins.figures",),
    "attach": (
        "attach.overhead.figures",
        "attach.acting.figures",
        "attach.probes.figures",
        "attach.grid.figures",
        "attach.recorded.figures",
        "attach.kills.figures_of_few",
    ),
    "attach_acting": ("attach.acting.figures",),
    "attach_recorded": ("attach.recorded.figures",),
    "attach_kills": ("attach.kills.figures",),
    "attach_grid": ("attach.grid.figures",),
    "attach_overhead": ("attach.overhead.figures",),
    "attach_probes": ("attach.probes.figures",),
    "detector": (
        "detector.methods.figures",
        "detector.series.figures",
        "detector.episodes.figures",
        "detector.held_out.figures",
        "detector.culprits.figures",
        "detector.data.figures",
        "detector.pipelines.figures",
        "detector.stated.figures",
    ),
    "detector_series": ("detector.series.figures", "detector.episodes.figures"),
    "detector_held_out": ("detector.held_out.figures",),
    "detector_data": ("detector.data.figures",),
    "detector_stated": ("detector.stated.figures",),
    "detector_pipelines": ("detector.pipelines.figures",),
    "scheduler": (
        "scheduler.pipeline.figures",
        "scheduler.planners.figures",
        "scheduler.malleus.figures",
        "scheduler.beliefs.figures",
        "scheduler.studies.figures",
        "scheduler.traces.figures",
        "scheduler.policies.figures",
        "scheduler.searched.figures",
    ),
    "scheduler_pipeline": ("scheduler.pipeline.figures",),
    "scheduler_planners": ("scheduler.planners.figures",),
    "scheduler_malleus": ("scheduler.malleus.figures",),
    "scheduler_beliefs": ("scheduler.beliefs.figures",),
    "scheduler_studies": ("scheduler.studies.figures",),
    "scheduler_traces": ("scheduler.traces.figures",),
    "scheduler_policies": ("scheduler.policies.figures",),
    "scheduler_searched": ("scheduler.searched.figures",),
    "gpu": ("gpu.runtime.figures", "gpu.attach.figures"),
    "runtime_tensor": ("runtime.tensor.figures",),
    "runtime_executor": ("runtime.executor.figures",),
    "runtime_changes": ("runtime.changes.figures",),
    "store": (
        "store.ingest.figures",
        "store.faults.figures",
        "store.queries.figures",
        "store.answers.figures",
        "store.exchange.figures",
    ),
    "store_ingest": ("store.ingest.figures",),
    "store_exchange": ("store.exchange.figures",),
    "store_faults": ("store.faults.figures",),
    "store_queries": ("store.queries.figures",),
    "store_answers": ("store.answers.figures",),
}
"""Name -> its parts, each a function of a module in one of the rooms beside this one."""


def part_names(name: str) -> tuple[str, ...]:
    """Which parts of a benchmark in `BENCHES` can be measured alone: its modules."""
    return tuple(dict.fromkeys(part.split(".")[-2] for part in BENCHES[name]))


def parts_of(name: str, only: str | None = None) -> tuple[Part, ...]:
    """The parts of a benchmark in `BENCHES`, or those of one of its modules."""
    places = [part.rpartition(".") for part in BENCHES[name] if only in (None, part.split(".")[-2])]
    return tuple(getattr(import_module(f"unskew.benchmarks.{module}"), function) for module, _, function in places)
