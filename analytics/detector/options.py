"""The fail-slow detector's thresholds, in one place (docs/internals/detector.md explains each); verdicts record their hash."""

from __future__ import annotations

import hashlib
from math import isfinite, log

import msgspec
import numpy as np

from unskew.analytics.detector.cusum import CusumLimits, threshold
from unskew.analytics.detector.residuals import Flags, Floats
from unskew.collector.events import DetectorMethod, DeviceKind


class DetectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`method`: whose tests decide on slow ranks, ours or ResiHP's (published/resihp.py); the rest is of ours. Excesses are
    logs of time ratios.

    `least_slowdown`: the smallest that is named; `least_slowdown_young`: as long as the rank's own past on its layers is not
    known (`own_past` iterations). `slack`: the part of it that a test forgives in each iteration, but at least
    `slack_sigmas` of the noise; the noise itself is learned and is never taken for less than `sigma_floor`.
    `false_alarms_per_device_day` and `iterations_per_day` (when iterations are no shorter than two seconds) set the
    thresholds of the tests. `links`: whether slow links are named too. `probes`: whether a probe may decide where the evidence
    is not enough. `job_slowdown`, `job_iterations`: what is forgiven of a slowdown of the whole job, and how long one has to
    last. Counts are iterations.
    """

    least_slowdown: float = 1.07
    least_slowdown_young: float = 1.15
    slack: float = 0.7
    slack_sigmas: float = 1.0
    sigma_floor: float = 0.015
    false_alarms_per_device_day: float = 1e-4
    iterations_per_day: int = 43_200
    least_iterations: int = 4
    links: bool = True
    probes: bool = True
    window: int = 32
    own_past: int = 20
    noise_gain: float = 0.1
    baseline_gain: float = 0.05
    job_slowdown: float = 1.05
    job_iterations: int = 4
    method: DetectorMethod = "unskew"

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not isfinite(value):
                raise ValueError(f"detector: {name} is {value}, it must be a finite number")
        if not (0 < self.noise_gain <= 1 and 0 < self.baseline_gain <= 1) or self.own_past < 1:
            raise ValueError("detector: noise_gain and baseline_gain must be above 0 and at most 1, own_past at least 1")
        if not 0 < self.slack < 1:
            raise ValueError(f"detector: slack is {self.slack}, it must be between 0 and 1 (a part of least_slowdown)")
        if (
            min(self.least_slowdown, self.least_slowdown_young, self.job_slowdown) <= 1
            or self.sigma_floor <= 0
            or self.slack_sigmas < 0
        ):
            raise ValueError("detector: the least slowdowns must be above 1, sigma_floor above 0, slack_sigmas not below 0")
        if not 0 < self.false_alarms_per_device_day < self.iterations_per_day:
            raise ValueError(
                f"detector: false_alarms_per_device_day is {self.false_alarms_per_device_day:g}, allowed: more than 0 and less "
                f"than iterations_per_day ({self.iterations_per_day})"
            )
        if not 4 <= self.least_iterations <= self.window // 2:
            raise ValueError(
                f"detector: least_iterations is {self.least_iterations}, allowed: 4 (three spikes never fire) to half of "
                f"window ({self.window})"
            )

    def least_level(self, *, young: bool = False) -> float:
        """Log of the smallest slowdown that is named."""
        return log(max(self.least_slowdown, self.least_slowdown_young) if young else self.least_slowdown)

    def slack_of(self, sigma: float, *, young: bool = False) -> float:
        """What a test forgives in each iteration at this noise."""
        return max(self.slack * self.least_level(young=young), self.slack_sigmas * max(sigma, self.sigma_floor))

    def threshold_of(self, sigma: float, tests: int) -> float:
        """The threshold of each of a device's `tests` tests at this noise, from the budget of false alarms."""
        sigma = round(max(sigma, self.sigma_floor), 3)
        return threshold(sigma, self.slack_of(sigma), tests * self.iterations_per_day / self.false_alarms_per_device_day)

    def limits_of(self, noise: Floats, young: Flags) -> CusumLimits:
        """The tests' constants at each kind's noise (nan = not learned yet); `young` [rank, kind]: no past is known."""
        sigma = [self.sigma_floor if np.isnan(value) else float(value) for value in noise]
        slack = np.array([self.slack_of(value) for value in sigma])
        slack_young = np.array([self.slack_of(value, young=True) for value in sigma])
        thresholds = np.array([self.threshold_of(value, len(sigma)) for value in sigma])
        return CusumLimits(np.where(young, slack_young, slack), thresholds, self.least_iterations)

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


EMULATED = DetectorOptions(least_slowdown=1.15, slack=0.5, sigma_floor=0.06, job_slowdown=1.15)
"""For virtual devices, whose clock no load disturbs; not even the messages'."""

SLEEPING = msgspec.structs.replace(EMULATED, links=False, job_slowdown=1.2, job_iterations=16)
"""For sleeping devices: their ranks share a few cores, which lengthens sleeps for some iterations, now and then everybody's,
and wakes who waits for a message late: at load 25 to 40 a healthy link was named in one of 7 runs of 40 iterations."""

SHARED_MACHINE = DetectorOptions(
    least_slowdown=1.4, least_slowdown_young=1.4, slack=0.5, sigma_floor=0.1, least_iterations=16, links=False, probes=False,
    job_slowdown=1.4, job_iterations=16,
)  # fmt: skip
"""For real CPU cores: ranks share caches, power and execution units with whatever else runs on the machine and beside it.
Healthy ranks really were 1.2 to 1.5 times slower for five to fifteen iterations, time without a core taken out. A single
product took 0.6 to 1.7 times as long as another before devices were warmed up for it; how far the nine on a warm one spread
was not measured, beyond that nobody was suspected in 11 healthy runs (docs/internals/probes.md). Also for ranks that share a
GPU, where what the others compute meanwhile is part of a chunk's time."""


def options_for(kind: DeviceKind | None, *, links: bool = False) -> DetectorOptions:
    """The thresholds for a kind of device; `links`: its messages say when they arrive."""
    of_kinds = {"sleep": SLEEPING, "virtual": EMULATED, "cores": SHARED_MACHINE, "shared_gpus": SHARED_MACHINE}
    options = of_kinds.get(str(kind), DetectorOptions())
    return msgspec.structs.replace(options, links=links or options.links)
