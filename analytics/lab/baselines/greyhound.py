"""Greyhound (ATC'25, arXiv 2410.12588): iteration times alone -> change point -> verification -> profile -> validation.

Nothing in it knows sequence lengths: a batch of long documents is a change of the iteration time like any other.
"""

from __future__ import annotations

from collections import deque

import msgspec

from unskew.analytics.core.iteration import Chunk
from unskew.analytics.lab.baselines.change_point import ChangePoint, ChangePointOptions, Series
from unskew.analytics.lab.baselines.naming import VerdictNames
from unskew.analytics.lab.baselines.validation import profile, validate
from unskew.analytics.replay.method import MethodInput, MethodOutput, Probe


class GreyhoundDetector:
    """Published settings: P > 0.9, 10 % between the means, 10 % above the median of equal groups."""

    name = "greyhound"

    def __init__(self, options: ChangePointOptions | None = None) -> None:
        self.options = options or ChangePointOptions()
        self.series = Series()
        self.names = VerdictNames(self.name)
        self.iterations: list[int] = []
        self.recent: deque[tuple[Chunk, ...]] = deque(maxlen=self.options.recent)

    def observe(self, observed: MethodInput, probe: Probe | None = None) -> MethodOutput:
        committed = observed.committed
        self.series = self.series.observe(committed.measured_us, self.options)
        self.iterations.append(committed.iteration)
        self.recent.append(committed.chunks)
        change = self.series.change(self.options)
        if change is None or (change.verified(self.options) and self.dismisses(change, observed)):
            return MethodOutput()
        self.series = self.series.taken(change)
        if not change.verified(self.options):
            return MethodOutput()
        return self.react(change, observed, probe)

    def dismisses(self, change: ChangePoint, observed: MethodInput) -> bool:  # noqa: ARG002  # ResiHP's filter overrides this
        """Whether the change is harmless after all."""
        return False

    def react(self, change: ChangePoint, observed: MethodInput, probe: Probe | None) -> MethodOutput:
        """Profile and validate; a faster job acquits who is no longer slow."""
        at, since = observed.committed.iteration, self.iterations[change.at]
        suspects = profile(self.recent, observed.plan)
        if not change.slower:
            still = validate(dict.fromkeys(self.names.ranks, 1.0), observed.plan, probe) if self.names.ranks else {}
            gone = [rank for rank in self.names.ranks if rank not in (still if probe else suspects)]
            return MethodOutput(verdicts=tuple(v for r in gone for v in self.names.acquit(r, at, "validated as healthy again")))
        culprits = validate(suspects, observed.plan, probe)
        evidence = {
            "change_point": {**msgspec.structs.asdict(change), "at": since},
            "suspects": {str(rank): round(ratio, 3) for rank, ratio in suspects.items()},
            "validated": probe is not None,
        }
        verdicts = tuple(
            verdict
            for rank, ratio in culprits.items()
            for verdict in self.names.flag(
                rank,
                {"F": round(1 / ratio, 4), "B": round(1 / ratio, 4)},
                since=since,
                at=at,
                sentence=f"rank {rank} computes {ratio:.2f} times as long as healthy since iteration {since}",
                evidence=evidence,
            )
        )
        alarm = f"iterations take {change.after_us / change.before_us:.2f} times as long since iteration {since}"
        return MethodOutput(verdicts=verdicts, alarm=alarm)
