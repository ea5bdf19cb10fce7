"""What `unskew bench NAME` runs: the parts of each benchmark, all of them measured in one store.

Only the modules of the chosen one are imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unskew.benchmarks.runs import Part

SLOW = ("slow.figures_of_a_strong_fault", "slow.figures_of_a_weak_fault")
BENCHES: dict[str, tuple[str, ...]] = {
    "loop": ("kills.figures", *SLOW, "outage.figures", "overhead.figures", "healthy.figures"),
    "kills": ("kills.figures",),
    "slow": SLOW,
    "outage": ("outage.figures",),
    "overhead": ("overhead.figures",),
    "healthy": ("healthy.figures",),
    "liveness": ("liveness.figures",),
    "recovery_replicas": ("recovery_replicas.figures",),
    "recovery": (
        "recovery_in_step.figures",
        "recovery_replicas.figures",
        "recovery_resume.figures",
        "recovery_soak.figures",
        "recovery_joins.figures",
        "recovery_joins.figures_of_quiet_ranks",
        "recovery_torchft.figures",
    ),
    "recovery_in_step": ("recovery_in_step.figures",),
    "recovery_torchft": ("recovery_torchft.figures",),
    "recovery_quiet": ("recovery_joins.figures_of_quiet_ranks",),
    "runtime": (
        "runtime_links.figures_by_logical_clock",
        "runtime_links.figures",
        "runtime_links.figures_of_blocking_sends",
    ),
    "runtime_virtual": ("runtime_links.figures_by_logical_clock",),
    "runtime_links": ("runtime_links.figures",),
    "runtime_blocking": ("runtime_links.figures_of_blocking_sends",),
    "recovery_resume": ("recovery_resume.figures",),
    "recovery_soak": ("recovery_soak.figures",),
    "recovery_joins": ("recovery_joins.figures",),
    "attach": (
        "attach_overhead.figures",
        "attach_acting.figures",
        "attach_probes.figures",
        "attach_recorded.figures",
        "attach_kills.figures_of_few",
    ),
    "attach_acting": ("attach_acting.figures",),
    "attach_recorded": ("attach_recorded.figures",),
    "attach_kills": ("attach_kills.figures",),
    "attach_overhead": ("attach_overhead.figures",),
    "attach_probes": ("attach_probes.figures",),
    "detector": (
        "detector_methods.figures",
        "detector_series.figures",
        "detector_episodes.figures",
        "detector_culprits.figures",
        "detector_data.figures",
        "detector_pipelines.figures",
        "detector_stated.figures",
    ),
    "detector_series": ("detector_series.figures", "detector_episodes.figures"),
    "detector_data": ("detector_data.figures",),
    "detector_stated": ("detector_stated.figures",),
    "detector_pipelines": ("detector_pipelines.figures",),
    "scheduler": (
        "scheduler_pipeline.figures",
        "scheduler_planners.figures",
        "scheduler_malleus.figures",
        "scheduler_beliefs.figures",
        "scheduler_studies.figures",
        "scheduler_traces.figures",
        "scheduler_policies.figures",
    ),
    "scheduler_pipeline": ("scheduler_pipeline.figures",),
    "scheduler_planners": ("scheduler_planners.figures",),
    "scheduler_malleus": ("scheduler_malleus.figures",),
    "scheduler_beliefs": ("scheduler_beliefs.figures",),
    "scheduler_studies": ("scheduler_studies.figures",),
    "scheduler_traces": ("scheduler_traces.figures",),
    "scheduler_policies": ("scheduler_policies.figures",),
    "runtime_tensor": ("runtime_tensor.figures",),
    "store": (
        "store_ingest.figures",
        "store_faults.figures",
        "store_queries.figures",
        "store_answers.figures",
        "store_exchange.figures",
    ),
    "store_faults": ("store_faults.figures",),
    "store_queries": ("store_queries.figures",),
    "store_answers": ("store_answers.figures",),
}
"""Name -> its parts, each a function of a module beside this one."""


def parts_of(name: str) -> tuple[Part, ...]:
    """The parts of a benchmark in `BENCHES`."""
    places = [part.split(".") for part in BENCHES[name]]
    return tuple(getattr(import_module(f"unskew.benchmarks.{module}"), function) for module, function in places)
