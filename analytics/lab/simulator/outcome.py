"""What came of a simulated job: its iterations, what the policy answered, and the sums (simulation.py makes it)."""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.core.constants import constant
from unskew.analytics.policies.base import Reaction


class IterationSegment(msgspec.Struct, frozen=True):
    """Iterations in a row under one layout: `start_s` and `seconds` are arrays [iteration]; `plan_version` counts from 0.

    `micro_batches` of each; a policy that leaves replicas out may train fewer than the job's.
    """

    plan_version: int = msgspec.field(name="epoch")
    micro_batches: int
    first_iteration: int
    start_s: np.ndarray
    seconds: np.ndarray
    predicted_s: float


class PolicyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy answered when it heard of `event`: `plan_version` is in force from `iteration` on, after the pauses.

    `acts` False: neither the layout changes nor does the job pause for it.
    """

    at_s: float
    resumed_s: float
    plan_version: int = msgspec.field(name="epoch")
    iteration: int
    event: ClusterEvent
    reaction: Reaction
    acts: bool
    predicted_s: float
    before_s: float


class SimulationOutcome(msgspec.Struct, kw_only=True):
    """`lost_s` + `useful_s` + `unexplained_s` = `whole_s`. `unexplained_s` is the noise of the iterations: above 0 they took
    longer than the model has them take, below 0 less. `checkpoint_s`: seconds between checkpoints, None = none are written."""

    job: Job
    policy: str
    whole_s: float
    useful_s: float
    lost_s: dict[str, float]
    unexplained_s: float
    tokens: float
    iterations: int
    failures: int
    aborted_s: float | None
    fault_free_s: float
    capacity: float
    checkpoint_s: float | None
    segments: list[IterationSegment]
    answers: list[PolicyAnswer]

    @property
    def changes(self) -> list[PolicyAnswer]:
        """The answers that changed the layout or made the job pause."""
        return [answer for answer in self.answers if answer.acts]

    @property
    def effective(self) -> float:
        """Effective training time: the share of the whole that was useful."""
        return self.useful_s / self.whole_s

    @property
    def samples_per_s(self) -> float:
        return self.tokens / self.job.seq / self.whole_s

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of all the job's devices."""
        return self.tokens / self.job.tokens * self.job.flops / (self.whole_s * self.job.devices * constant(self.job.peak))

    def facts(self) -> dict[str, object]:
        """The numbers without the series: what is printed and stored."""
        return {
            "job": self.job.name, "policy": self.policy, "hours": self.whole_s / 3600.0, "devices": self.job.devices,
            "iterations": self.iterations, "failures": self.failures, "effective_training_time": self.effective,
            "goodput": self.effective, "samples_per_s": self.samples_per_s, "tokens": self.tokens, "mfu": self.mfu,
            "fault_free_iteration_s": self.fault_free_s, "surviving_capacity": self.capacity, "aborted_s": self.aborted_s,
            "changes": len(self.changes), "checkpoint_s": self.checkpoint_s, "useful_s": self.useful_s,
            "lost_s": dict(self.lost_s), "unexplained_s": self.unexplained_s,
        }  # fmt: skip
