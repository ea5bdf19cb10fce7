"""Bayesian online change-point detection of iteration times, and its verification: Greyhound's, inherited by ResiHP.

Model (Adams and MacKay 2007; Greyhound cites Agudelo-Espana et al. 2020): within a run times are normal with unknown mean and
variance (normal-inverse-gamma prior), runs end with a constant hazard; the posterior of the run length is updated per
iteration.

Greyhound reports a change when ``P(run length = 0) > 0.9``. Under a constant hazard that probability is the hazard itself,
whatever the data; what the rule can only mean is that the posterior has moved to a run that began just now. Here: a run of at
most `within` iterations has that probability, and the likeliest one has lasted `recent`, so that there is an "after" to verify
with. That gives the published reaction of 2 to 3 iterations where the change is clear.
"""

from __future__ import annotations

import msgspec
import numpy as np
from scipy.special import gammaln

from unskew.analytics.detector.residuals import Floats


class ChangePointOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`probability` and `least_change` are Greyhound's, `apart` its artifact's: the least distance of change points. Hazard,
    prior (`prior_cv`: its standard deviation over its mean), `recent` and `within` (iterations) are stated nowhere and were
    chosen so that Greyhound's own table comes out (tests/analytics/lab/test_baselines_published.py)."""

    probability: float = 0.9
    least_change: float = 0.1
    recent: int = 3
    within: int = 5
    apart: int = 10
    hazard: float = 1 / 100
    prior_cv: float = 0.02
    longest: int = 300


class Posterior(msgspec.Struct, frozen=True):
    """Per run length 0, 1, ...: log probability, and the normal-inverse-gamma parameters of the run's times."""

    log_p: Floats
    mean: Floats
    weight: Floats
    shape: Floats
    scale: Floats

    @staticmethod
    def prior(first: float, options: ChangePointOptions) -> Posterior:
        """Before the first time `first`, which sets the scale."""
        one = np.ones(1)
        return Posterior(np.zeros(1), one * first, one * 0.1, one * 1.0, one * (options.prior_cv * first) ** 2)

    def observe(self, x: float, new: Posterior, options: ChangePointOptions) -> Posterior:
        """With the next time; a new run begins from the prior `new`."""
        spread = self.scale * (self.weight + 1) / (self.weight * self.shape)
        dof = 2 * self.shape
        log_likelihood = (
            gammaln((dof + 1) / 2)
            - gammaln(dof / 2)
            - 0.5 * np.log(np.pi * dof * spread)
            - (dof + 1) / 2 * np.log1p((x - self.mean) ** 2 / (dof * spread))
        )
        joint = self.log_p + log_likelihood
        grown = joint + np.log1p(-options.hazard)
        ended = np.logaddexp.reduce(joint) + np.log(options.hazard)
        log_p = np.concatenate(([ended], grown))[: options.longest]
        weight = self.weight + 1
        mean = (self.weight * self.mean + x) / weight
        scale = self.scale + 0.5 * self.weight * (x - self.mean) ** 2 / weight
        keep = slice(0, options.longest)
        return Posterior(
            log_p - np.logaddexp.reduce(log_p),
            np.concatenate((new.mean, mean))[keep],
            np.concatenate((new.weight, weight))[keep],
            np.concatenate((new.shape, self.shape + 0.5))[keep],
            np.concatenate((new.scale, scale))[keep],
        )


class ChangePoint(msgspec.Struct, frozen=True):
    """A probable change of the mean iteration time, from position `at` of the series on; before = since the last change."""

    at: int
    probability: float
    before_us: float
    after_us: float

    def verified(self, options: ChangePointOptions) -> bool:
        """Whether the means differ enough; else it is jitter."""
        return abs(self.after_us / self.before_us - 1) >= options.least_change

    @property
    def slower(self) -> bool:
        return self.after_us > self.before_us


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The iteration times seen (us) and their posterior; `last` = position of the last change."""

    times: tuple[float, ...] = ()
    posterior: Posterior | None = None
    last: int = 0

    def observe(self, us: float, options: ChangePointOptions) -> Series:
        """With the next iteration's time."""
        new = Posterior.prior(self.times[0] if self.times else us, options)
        posterior = (self.posterior or new).observe(us, new, options)
        return msgspec.structs.replace(self, times=(*self.times, us), posterior=posterior)

    def change(self, options: ChangePointOptions) -> ChangePoint | None:
        """The change point that the last iteration reveals, if any."""
        if self.posterior is None or len(self.times) < self.last + options.apart:
            return None
        recent = np.exp(self.posterior.log_p[: options.within + 1])
        probability = float(recent.sum())
        length = int(np.argmax(recent))
        at = len(self.times) - length
        if probability <= options.probability or length < options.recent or at - self.last < options.apart:
            return None
        before, after = float(np.mean(self.times[self.last : at])), float(np.mean(self.times[at:]))
        return ChangePoint(at, probability, before, after)

    def taken(self, change: ChangePoint) -> Series:
        """What comes is compared with what came after this change, jitter or not."""
        return msgspec.structs.replace(self, last=change.at)
