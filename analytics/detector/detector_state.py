"""What the Detector remembers between iterations, and how a rank comes to be flagged in it."""

from __future__ import annotations

from collections.abc import Collection
from math import exp

import msgspec
import numpy as np

from unskew.analytics.core.cost import CostModel
from unskew.analytics.detector.links import Link, LinkTrack
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import PeerGroups
from unskew.analytics.detector.published.changes import ChangeAlarm, ChangeWatch
from unskew.analytics.detector.residuals import ALL
from unskew.analytics.detector.stages import Stages, suspected
from unskew.analytics.detector.tracks import Tracks
from unskew.analytics.detector.verdicts import SpeedChange, slow_verdict
from unskew.collector.events import Verdict, VerdictClosed

Verdicts = tuple[Verdict | VerdictClosed, ...]


class DetectorState(msgspec.Struct, frozen=True, kw_only=True):
    """All that the detector remembers; never changed, only replaced. `lost`: rank -> the verdict on its loss, while it is gone;
    `onsets`: rank -> where its last episode began; `episodes`: rank -> how often it has been slow; `acquitted`: rank ->
    iteration of its last acquittal; `noise`: kind -> sigma learned; `links`, `open_links`, `stages`: what is remembered of
    these; `changes`, `alarm`: of ResiHP's method, the iteration times and who is to be validated.
    """

    iteration: int = -1
    company: PeerGroups | None = None
    cost: CostModel | None = None
    layers: dict[int, tuple[int, ...]] = {}
    tracks: Tracks = Tracks.none()
    noise: dict[str, float] = {}
    open: dict[int, int] = {}
    lost: dict[int, int] = {}
    onsets: dict[int, int] = {}
    episodes: dict[int, int] = {}
    acquitted: dict[int, int] = {}
    links: dict[Link, LinkTrack] = {}
    open_links: dict[Link, int] = {}
    stages: Stages | None = None
    changes: ChangeWatch = ChangeWatch()
    alarm: ChangeAlarm | None = None
    next_verdict: int = 1

    @property
    def speeds(self) -> dict[int, dict[str, float]]:
        """rank -> kind -> estimated speed, where it is not the healthy one."""
        tracks = self.tracks
        found: dict[int, dict[str, float]] = {}
        for row, column in np.argwhere(tracks.level).tolist():
            if tracks.kinds[column] != ALL:
                found.setdefault(tracks.ranks[row], {})[tracks.kinds[column]] = exp(-tracks.level[row, column])
        return found


def suspects_stage(state: DetectorState) -> bool:
    """Whether a stage is slow, or may be."""
    return state.company is not None and bool(suspected(state.stages, state.company))


def waiting_for(state: DetectorState, rank: int) -> set[int]:
    """The peers that a rank holds up."""
    assert state.company is not None
    return {*state.company.data_parallel_peers.get(rank, ()), *state.company.pipeline_peers.get(rank, ())}


def flag_rank(
    state: DetectorState,
    rank: int,
    change: SpeedChange,
    now: int,
    options: DetectorOptions,
    *,
    sigma: float,
    victims: Collection[int],
) -> tuple[DetectorState, Verdicts]:
    """The rank's speed is another: a verdict, or a revision of the open one."""
    known = rank in state.open
    number = state.open.get(rank, state.next_verdict)
    episodes = state.episodes.get(rank, 0) + (not known)
    onset = state.onsets[rank] if known else change.since
    verdict = slow_verdict(
        number,
        rank,
        change,
        kinds=len(state.tracks.kinds_of(rank)) or len(change.levels) - 1,
        victims=victims,
        at=now,
        sigma=sigma,
        episodes=episodes,
        onset=onset,
        options=options,
    )
    return msgspec.structs.replace(
        state,
        open={**state.open, rank: number},
        onsets={**state.onsets, rank: onset},
        episodes={**state.episodes, rank: episodes},
        next_verdict=max(state.next_verdict, number + 1),
    ), (verdict,)
