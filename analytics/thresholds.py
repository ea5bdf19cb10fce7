"""The fail-slow detector's thresholds, in one place (docs/detector.md explains each); verdicts record their hash."""

from __future__ import annotations

import hashlib
from math import log

import msgspec


class DetectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Excesses are logs of time ratios; `slack`, `threshold` and `winsor` are in units of the noise (sigma)."""

    least_slowdown: float = 1.15
    sigma_floor: float = 0.05
    slack: float = 1.4
    threshold: float = 12.0
    winsor: float = 5.0
    least_iterations: int = 4
    window: int = 32
    noise_gain: float = 0.1
    baseline_gain: float = 0.05
    baseline_bound: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.slack < self.winsor:
            raise ValueError(f"detector: slack is {self.slack}, it must be at least 0 and less than winsor ({self.winsor})")
        least = 3 * (self.winsor - self.slack)
        if self.threshold < least:
            raise ValueError(
                f"detector: threshold is {self.threshold:g}: three spikes would fire, at least {least:g} is needed"
            )
        if self.least_slowdown <= 1 or self.sigma_floor <= 0:
            raise ValueError("detector: least_slowdown must be above 1 and sigma_floor above 0")
        if not 2 <= self.least_iterations <= self.window // 2:
            raise ValueError(
                f"detector: least_iterations is {self.least_iterations}, allowed: 2 to half of window ({self.window})"
            )

    @property
    def least_level(self) -> float:
        """Log of the smallest slowdown that is named."""
        return log(self.least_slowdown)

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


SHARED_MACHINE = DetectorOptions(sigma_floor=0.1)
"""For real CPU cores: ranks share caches, power and execution units with whatever else runs on the machine. With the ordinary
floor healthy ranks were accused that really were 1.2 to 1.3 times slower for some iterations; x1.8 is still named in four."""
