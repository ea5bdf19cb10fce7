"""What the Scheduler is told, and its thresholds."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.memory import Room
from unskew.analytics.planners.problem import Level
from unskew.analytics.scheduler.cost_benefit import FaultLife


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is estimated when a plan is sought. `origin` is the run's first plan: it gives each rank its replica and its place.

    `batches[k][m]`: work of micro-batch m in the k-th recent iteration (10 to 30 of them). `iterations` = length of the run.
    `layer_bytes[l]`: parameters and optimiser state of layer l; `bytes_per_us`: at which rate moved layers travel, all
    together; `regroup_us`: standstill at the boundary. `slow_since[r]`: the iteration in which the slowness of rank r began.
    `units`: in how many a layer can be cut among the members of a tensor-parallel group; 0 = it cannot. `room`: the memory that
    ranks have, and what fills it; None = without limit. `ranks_per_node`: the members of a group share a node of so many; 0 =
    wherever they are. `prices_sums`: `cost` says what groups exchange; else larger ones look better than they are.
    """

    origin: Plan
    alive: frozenset[int]
    speeds: dict[int, dict[str, float]]
    cost: CostModel
    batches: tuple[tuple[Work, ...], ...]
    iterations: int
    layer_bytes: tuple[int, ...]
    bytes_per_us: float
    regroup_us: float
    slow_since: dict[int, int] = {}
    units: int = 0
    room: Room | None = None
    ranks_per_node: int = 0
    prices_sums: bool = True


Part = Literal["joint planner", "laid out anew", "ResiHP's three levels", "local search", "worth test"]
"""What an ablation can leave out: candidates by their names, and two steps of the search."""


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds. `margin`: how many times the expected gain must repay the cost; `life`: how long slow phases last; a rank
    slower than `leave_below` may be left out; the search ends after `search_actions` scheduled actions: a count, so that its
    result does not depend on the load. `levels`: what may change, for ablations: without tp groups stay whole and even,
    without pp replicas keep the first plan's layers, without dp those that work have the same micro-batches; `without`: parts
    of the search that are left out, for ablations too."""

    min_gain_percent: float = 3.0
    margin: float = 1.5
    tie_percent: float = 0.5
    leave_below: float = 0.5
    search_actions: int = 100_000
    life: FaultLife = FaultLife()
    levels: tuple[Level, ...] = ("tp", "pp", "dp")
    without: tuple[Part, ...] = ()

    @property
    def digest(self) -> str:
        facts = msgspec.structs.asdict(self)
        if not self.without:  # of a whole search it is what it was before parts of one could be left out
            del facts["without"]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
