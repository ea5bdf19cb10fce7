"""What the deciding part of a run is given: the place it decides for, and its options."""

from __future__ import annotations

import msgspec

from unskew.analytics.core.cost import GradientSync
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.health.probing import ProbeOptions
from unskew.analytics.pipeline.memory import LayerMemory, Room, peak_bytes
from unskew.analytics.predictor.retraining import RetrainingOptions
from unskew.analytics.scheduler.state import SchedulerOptions
from unskew.analytics.shards.together import LayerSums


class AdaptationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are iterations. `settle`: so long after a change of plan or of estimate before the Scheduler is asked; `patience`:
    so long it waits with its answer for a rank that is to come; `score_over`: an effect is scored over so many (scoring.py says
    over how few it is void). `policy`: who decides on plans, the Scheduler (unskew) or a published one (by_policy/)."""

    retraining: RetrainingOptions = RetrainingOptions()
    recent: int = 20
    settle: int = 2
    patience: int = 20
    score_over: int = 20
    probing: ProbeOptions = ProbeOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    policy: str = "unskew"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known of the place, beyond what the log tells (see `SchedulerState`).

    `layer_bytes`, `bytes_per_us`, `regroup_us`: what a change of plan costs until the run has measured its own. Where no sizes
    of layers are stated no plan is to be changed, and the Scheduler is not asked. `shared_cores`: ranks outnumber these cores
    of a real device, None elsewhere (`CostModel.cores`). `truth_known`: every slowness is injected (emulated devices).
    `detector`: the thresholds for this class of device.
    `units`: in how many a layer can be cut among tensor-parallel ranks. `classes`: device class -> its ranks
    (`CostModel.classes`). `first_iteration`: where the run begins, later than 0 when it is resumed. `respawns`: how often
    mode auto starts a lost rank again; `most_ranks`: for so many ranks the node has a place. `by_replica`: a lost rank takes
    its replica out, and plans change in no other case (scheduler/replicas.py). `blocking_sends`: who sends does nothing else
    until the message has arrived. `sync`: gradients' sizes, where their sums cost something by themselves. `layer_sums`: as in
    `CostModel`. `memory`: what layers take, where that is known, with micro-batches of at most so many `tokens`.
    `room_bytes`: how much of what `memory` counts a rank can hold; None = unknown, so without limit.
    """

    origin: Plan
    iterations: int
    layer_bytes: tuple[int, ...] = ()
    bytes_per_us: float = 0.0
    regroup_us: float = 0.0
    shared_cores: int | None = None
    detector: DetectorOptions = DetectorOptions()
    truth_known: bool = False
    classes: dict[str, tuple[int, ...]] = {}
    first_iteration: int = 0
    respawns: int = 0
    most_ranks: int = 0
    by_replica: bool = False
    units: int = 0
    blocking_sends: bool = False
    room_bytes: float | None = None
    sync: GradientSync | None = None
    layer_sums: LayerSums = ()
    memory: LayerMemory | None = None
    tokens: int = 0

    @property
    def room(self) -> Room | None:
        """The memory of a rank, and what fills it; None = without limit."""
        if self.memory is None or self.room_bytes is None:
            return None
        return Room(memory=self.memory, tokens=self.tokens, rank_bytes=self.room_bytes)

    @property
    def layers_room_bytes(self) -> float | None:
        """For how much of layers, counted as `layer_bytes` counts them, a rank has memory."""
        if self.room is None:
            return None
        return self.room.rank_bytes * sum(self.layer_bytes) / float(self.room.memory.held.sum())

    def fitted(self, plan: Plan, before: Plan | None = None) -> Plan:
        """The plan, as its ranks can hold it, and go over to it from the one `before`. Raises `PlanError`."""
        return plan if self.room is None else self.room.fitted(plan, before)

    def peak_bytes(self, plan: Plan, before: Plan) -> dict[str, int]:
        """Rank -> the most memory that it needs under `plan`, and on the way from the one `before`, as it is stated in the
        log."""
        if self.memory is None:
            return {}
        return {str(rank): round(most) for rank, most in peak_bytes(plan, self.memory, self.tokens, before).items()}
