"""What a simulation is asked for, as text: a cluster and its faults.

llama2-7b            a preset (data/clusters.toml), or
llama2-7b,dp=8       a preset with some of tp, dp, pp, micro_batches, n_layers changed

llama3               failures at a published rate (data/rates.toml); "healthy" = none, or
mtbf_s=3600,law=weibull,repair_s=1800,slow_per_100_hours=7.8     the fields of FaultLaw
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from unskew.analytics.cluster.job import JOBS, Job
from unskew.analytics.cluster.random_faults import RATES
from unskew.analytics.core.constants import constant
from unskew.analytics.lab.simulator.arrivals import FaultLaw
from unskew.collector.decoding import complaint


class SpecError(ValueError):
    """A text with no possible meaning; one sentence: what is wrong, what is allowed."""


_LEAST_S = 1.0
_MOST_DEVICES = 1_000_000
_MOST_OFTEN = {
    "failures_per_node_day": 100, "slow_per_100_hours": 10_000, "links_per_100_hours": 10_000,
    "maintenance_per_100_hours": 10_000,
}  # fmt: skip
_CHANGEABLE = ("tp", "dp", "pp", "micro_batches", "n_layers")


def parse_cluster(text: str) -> Job:
    """The job that a text names. Raises `SpecError`."""
    name, _, rest = text.partition(",")
    if name not in JOBS:
        raise SpecError(f"{text}: {name!r} is not known, allowed: {', '.join(JOBS)}")
    job = JOBS[name]
    changes = _pairs(text, rest, _CHANGEABLE)
    if not changes:
        return job
    numbers = {key: _positive(text, key, value) for key, value in changes.items()}
    if "dp" in numbers and "micro_batches" not in numbers:
        numbers["micro_batches"] = job.micro_batches // job.dp * numbers["dp"]
    changed = msgspec.structs.replace(job, name=text, **numbers)
    if changed.n_layers < changed.pp or changed.micro_batches < changed.dp:
        raise SpecError(f"{text}: at least one layer per stage and one micro-batch per replica are needed")
    if changed.devices > _MOST_DEVICES:
        raise SpecError(f"{text}: {changed.devices:,} GPUs are more than the {_MOST_DEVICES:,} that are simulated")
    return changed


def parse_faults(text: str) -> FaultLaw:
    """The law of faults that a text names. Raises `SpecError`."""
    name, _, rest = text.partition(",")
    base: dict[str, object] = {}
    if name in RATES:
        base = {"failures_per_node_day": RATES[name].failures_per_node_day, "repair_s": constant("repair_median_s")}
    elif name != "healthy":
        rest = text
    fields = msgspec.structs.fields(FaultLaw)
    if unknown := [name] if name and "=" not in name and name not in RATES and name != "healthy" else []:
        raise SpecError(f"{text}: {unknown[0]!r} is not known, allowed: healthy, {', '.join(RATES)}, trace:FILE "
                        f"and {', '.join(field.name + '=' for field in fields)}")  # fmt: skip
    given = _pairs(text, rest, tuple(field.name for field in fields))
    try:
        law = msgspec.convert({**base, **given}, FaultLaw, strict=False)
    except msgspec.ValidationError as error:
        raise SpecError(f"{text}: {complaint(error)}") from None
    numbers = [value for value in msgspec.structs.asdict(law).values() if isinstance(value, float)]
    if not all(0 <= value < math.inf for value in numbers) or (law.mtbf_s is not None and law.mtbf_s < _LEAST_S):
        raise SpecError(f"{text}: rates and times must be positive and finite, mtbf_s at least {_LEAST_S:g}")
    for name, most in _MOST_OFTEN.items():
        if getattr(law, name) > most:
            raise SpecError(f"{text}: {name} is at most {most:,}")
    if max(law.correlated_share, law.lemon_share) > 1:
        raise SpecError(f"{text}: a share is at most 1")
    if law.repair_s == 0:
        raise SpecError(f"{text}: repair_s must be greater than 0; leave it out if nothing is repaired")
    return law


def _pairs(text: str, rest: str, allowed: tuple[str, ...]) -> Mapping[str, str]:
    pairs = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if key not in allowed or not equals:
            raise SpecError(f"{text}: {pair!r} is not a setting, allowed: {', '.join(f'{k}=' for k in allowed)}")
        pairs[key] = value
    return pairs


def _positive(text: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise SpecError(f"{text}: {key}={value} must be a whole number of at least 1")
    return int(value)
