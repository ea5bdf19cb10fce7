"""The noise of healthy devices, as data/noise.toml fixes it: one source for every synthetic job, test and figure of detection.

    time of a chunk = predicted time x device factor[iteration, device] x chunk factor

The device factor is its own pace, an AR(1) drift, and now and then an iteration that takes 1.5 to 3.4 times as long; the chunk
factor is a residual of a real trace, and now and then a spike of one chunk. All are drawn from the generator that is passed in.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from unskew.data import table

Floats = NDArray[np.float64]


class DeviceNoise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`static_sd`, `drift_sd`: standard deviations of logs; `drift_phi` per iteration."""

    static_sd: float
    drift_sd: float
    drift_phi: float


class Spike(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Probabilities per chunk and per (device, iteration); factors from `low` to `high`."""

    chunk_probability: float
    device_probability: float
    low: float
    high: float


class Seeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First seed of what is tuned and of what is reported."""

    tuning: int
    figures: int


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's content; `residuals`: kind of work -> evenly spaced quantiles of the log residual."""

    device: DeviceNoise
    spike: Spike
    residuals: dict[str, tuple[float, ...]]
    seeds: Seeds


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A corpus: evenly spaced quantiles of its documents' lengths, in tokens."""

    source: str
    tokens: tuple[float, ...]


def load_noise() -> Noise:
    """The shipped noise."""
    return table("noise", Noise)


def load_lengths(corpus: str) -> Floats:
    """Evenly spaced quantiles of the document lengths (tokens) of `corpus`: "code" or "prolong". Raises `KeyError`."""
    return np.array(table("lengths", dict[str, Lengths])[corpus].tokens, dtype=np.float64)


def device_factors(noise: Noise, random: np.random.Generator, iterations: int, devices: int) -> Floats:
    """[iteration, device]: static spread x drift x whole-iteration spikes."""
    device = noise.device
    static = random.normal(0.0, device.static_sd, devices)
    pushes = random.normal(0.0, device.drift_sd * np.sqrt(1 - device.drift_phi**2), (iterations, devices))
    pushes[0] = random.normal(0.0, device.drift_sd, devices)  # begins stationary
    drift = lfilter([1.0], [1.0, -device.drift_phi], pushes, axis=0)
    spikes = _spikes(noise.spike, noise.spike.device_probability, random, (iterations, devices))
    return np.asarray(np.exp(static + drift) * spikes)


def chunk_factors(noise: Noise, random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Floats:
    """Residuals of the trace x spikes of single chunks, for work of `kind` (W is like B)."""
    quantiles = np.array(noise.residuals["F" if kind == "F" else "B"])
    drawn = np.interp(random.random(shape), np.linspace(0, 1, len(quantiles)), quantiles)
    return np.asarray(np.exp(drawn) * _spikes(noise.spike, noise.spike.chunk_probability, random, shape))


def _spikes(spike: Spike, probability: float, random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    factors = random.uniform(spike.low, spike.high, shape)
    return np.where(random.random(shape) < probability, factors, 1.0)
