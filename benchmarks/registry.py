"""What `unskew bench NAME` runs: the parts of each benchmark, all of them measured in one store."""

from __future__ import annotations

from unskew.benchmarks import (
    detector_culprits,
    detector_data,
    detector_episodes,
    detector_methods,
    detector_series,
    healthy,
    kills,
    liveness,
    outage,
    overhead,
    scheduler_beliefs,
    scheduler_pipeline,
    scheduler_planners,
    scheduler_studies,
    scheduler_traces,
    slow,
    store_exchange,
    store_faults,
    store_ingest,
    store_queries,
)
from unskew.benchmarks.runs import Part

SLOW: tuple[Part, ...] = (slow.figures_of_a_strong_fault, slow.figures_of_a_weak_fault)
BENCHES: dict[str, tuple[Part, ...]] = {
    "loop": (kills.figures, *SLOW, outage.figures, overhead.figures, healthy.figures),
    "kills": (kills.figures,),
    "slow": SLOW,
    "outage": (outage.figures,),
    "overhead": (overhead.figures,),
    "healthy": (healthy.figures,),
    "liveness": (liveness.figures,),
    "detector": (
        detector_methods.figures,
        detector_series.figures,
        detector_episodes.figures,
        detector_culprits.figures,
        detector_data.figures,
    ),
    "detector_series": (detector_series.figures, detector_episodes.figures),
    "detector_data": (detector_data.figures,),
    "scheduler": (
        scheduler_pipeline.figures,
        scheduler_planners.figures,
        scheduler_beliefs.figures,
        scheduler_studies.figures,
        scheduler_traces.figures,
    ),
    "scheduler_pipeline": (scheduler_pipeline.figures,),
    "scheduler_planners": (scheduler_planners.figures,),
    "scheduler_beliefs": (scheduler_beliefs.figures,),
    "scheduler_studies": (scheduler_studies.figures,),
    "scheduler_traces": (scheduler_traces.figures,),
    "store": (store_ingest.figures, store_faults.figures, store_queries.figures, store_exchange.figures),
    "store_faults": (store_faults.figures,),
    "store_queries": (store_queries.figures,),
}
