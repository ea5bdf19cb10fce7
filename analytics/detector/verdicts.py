"""Verdicts: what a test that fired has found; the event of it, with the sentence for people and the numbers that decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, sqrt
from typing import Any

import msgspec
from scipy.special import stdtr

from unskew.analytics.detector import links
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import ALL
from unskew.analytics.health.liveness import Suspect
from unskew.collector.events import Cause, Party, Verdict, VerdictClosed

WORK = {
    "F": "its forward pass",
    "B": "its backward pass",
    "W": "its weight gradients",
    "optimizer": "its optimizer step",
    "other": "the rest of its step",
}
ALIKE = 1.5  # speeds that differ by more are not one
LEAST_SPEED = 1e-4  # less is not told apart, and is never zero: what is slow is not gone
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean, normal noise
UNDECIDED = 0.5  # two explanations, and nothing tells which


class Excess(msgspec.Struct, frozen=True, gc=False):
    """Median excess over some iterations against each reference that exists; None = there is no such reference."""

    own: float
    data_parallel_peers: float | None = None
    pipeline_peers: float | None = None

    @property
    def least(self) -> float:
        """What remains of a slowness after every excuse."""
        return min(self._values())

    @property
    def most(self) -> float:
        """What remains of a recovery after every excuse (residuals fall when a device recovers)."""
        return max(self._values())

    def _values(self) -> list[float]:
        return [value for value in (self.own, self.data_parallel_peers, self.pipeline_peers) if value is not None]


class SpeedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A test has fired. `levels` (kind -> -log speed, `ALL` included) is empty when the rank is as healthy as the rest.

    `test`, `cusum`, `threshold`: the kind whose sum is highest over its threshold; `excess`: typical excess per kind over
    `iterations` iterations since `since`. `creep`: by how much the biases (log, per kind) had already risen when the test
    fired, where that is as much as half of what is named; `levels` includes it.
    """

    since: int
    iterations: int
    test: str
    cusum: float
    threshold: float
    levels: dict[str, float]
    excess: dict[str, Excess]
    creep: dict[str, float] = {}


def devices(ranks: Iterable[int]) -> tuple[Party, ...]:
    return tuple(Party(kind="device", rank=rank) for rank in sorted(ranks))


def slow_verdict(
    number: int,
    rank: int,
    change: SpeedChange,
    *,
    kinds: int,
    victims: Iterable[int],
    at: int,
    sigma: float,
    episodes: int,
    options: DetectorOptions,
    onset: int | None = None,
) -> Verdict:
    """`rank` is slow as in `change`; `kinds` is how many kinds of work it executes, `sigma` the noise of the test that fired,
    `episodes` how often the rank has been slow, this time included; `onset`: of a revision, since when this time.

    Confidence: that the level is more than the test's slack.
    """
    speed = {kind: max(round(exp(-level), 4), LEAST_SPEED) for kind, level in sorted(change.levels.items()) if kind != ALL}
    excess = max(change.levels.values()) - options.slack_of(sigma)
    again = f", for the {_ordinal(episodes)} time" if episodes > 1 else ""
    longer = f", and has been slow since iteration {onset}" if onset is not None and onset < change.since else ""
    since = f"since iteration {change.since}" if not change.creep else f"and has crept there before iteration {change.since}"
    return Verdict(
        verdict=number,
        cause="slow_device",
        culprits=devices([rank]),
        victims=devices(victims),
        speed=speed,
        since_iteration=change.since,
        at_iteration=at,
        confidence=confidence_of(excess, sigma, change.iterations),
        sentence=f"rank {rank} {_pace(speed, kinds)} {since}{longer}{again}",
        evidence={
            "test": change.test,
            "cusum": round(change.cusum, 3),
            "threshold": round(change.threshold, 3),
            "sigma": round(sigma, 4),
            "n": change.iterations,
            "pattern": "creep" if change.creep else "step",
            "episode": episodes,
            "time_ratio": {kind: _ratios(found) for kind, found in sorted(change.excess.items())},
        },
        config=options.digest,
    )


def confidence_of(excess: float, sigma: float, n: int) -> float:
    """How sure it is that the median of `n` values of noise `sigma` is above 0, when it is `excess`: Student's t, n - 1
    degrees (of one value: 1)."""
    error = MEDIAN_ERROR * sigma / sqrt(n)
    return round(float(stdtr(max(n - 1, 1), excess / error)), 3)


def replica_words(replica: int, ranks: Sequence[int]) -> str:
    """A replica with its ranks.

    >>> replica_words(1, [2, 3])
    'replica 1 (ranks 2, 3)'
    """
    return f"replica {replica} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"


def link_verdict(number: int, change: links.LinkChange, at: int, config: str) -> Verdict:
    """A link is slow as in `change`; the receiver's waiting is its only trace, so both ends are its victims."""
    sender, receiver = change.link
    return Verdict(
        verdict=number,
        cause="slow_link",
        culprits=(Party(kind="link", link=change.link),),
        victims=devices(change.link),
        since_iteration=change.since,
        at_iteration=at,
        confidence=1.0,
        sentence=(
            f"messages from rank {sender} to rank {receiver} take {change.more_us / 1e3:.1f} ms longer than usual since "
            f"iteration {change.since}"
        ),
        evidence={
            "time_ratio": round(change.ratio, 3),
            "more_us": round(change.more_us),
            "lost_share": round(change.lost_share, 4),
            "n": change.n,
        },
        config=config,
    )


def closed_link(number: int, change: links.LinkChange, at: int) -> VerdictClosed:
    sender, receiver = change.link
    reason = f"messages from rank {sender} to rank {receiver} take as long as usual since iteration {change.since}"
    return VerdictClosed(verdict=number, until_iteration=change.since, at_iteration=at, reason=reason)


def closed_verdict(number: int, rank: int, change: SpeedChange, at: int) -> VerdictClosed:
    reason = f"rank {rank} is back at its healthy speed since iteration {change.since}"
    return VerdictClosed(verdict=number, until_iteration=change.since, at_iteration=at, reason=reason)


def lost_verdict(number: int, suspect: Suspect, at: int, config: str) -> Verdict:
    """A frozen rank hangs: its process exists and does nothing; `evidence["how"]` distinguishes the three."""
    cause: Cause = "dead" if suspect.how == "exit" else "hung"
    state = {"exit": "died", "hung": "hangs", "frozen": "is frozen"}[suspect.how]
    return Verdict(
        verdict=number,
        cause=cause,
        culprits=devices([suspect.rank]),
        victims=devices(suspect.victims),
        since_iteration=at,
        at_iteration=at,
        confidence=1.0,
        sentence=f"rank {suspect.rank} {state} in iteration {at}: {suspect.detail}",
        evidence={"how": suspect.how, "detail": suspect.detail},
        config=config,
    )


def _pace(speed: dict[str, float], kinds: int) -> str:
    """As one speed where all that it computes is about as slow, else the slowest first."""
    alike = max(speed.values()) <= ALIKE * min(speed.values())
    if len(speed) == kinds and alike and not speed.keys() & {"optimizer", "other"}:
        return f"computes at {_share(sum(speed.values()) / len(speed))} of its healthy speed"
    parts = [f"{WORK.get(kind, kind)} at {_share(value)}" for kind, value in sorted(speed.items(), key=lambda one: one[1])]
    return f"runs {' and '.join(parts)} of its healthy speed"


def _share(speed: float) -> str:
    """To two places, or as a part of one.

    >>> _share(0.461), _share(0.00123)
    ('0.46', '1/813')
    """
    return f"{speed:.2f}" if speed >= 0.01 else f"1/{1 / speed:,.0f}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _ratios(found: Excess) -> dict[str, Any]:
    """Time ratios: against the rank's own prediction, its data-parallel peers, pipeline peers."""
    pairs = (("predicted", found.own), ("peers", found.data_parallel_peers), ("mates", found.pipeline_peers))
    return {name: round(exp(value), 3) for name, value in pairs if value is not None}
