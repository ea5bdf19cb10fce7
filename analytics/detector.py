"""Fail-slow: committed iterations, one after the other -> judged iterations and verdicts (docs/detector.md).

Per iteration:

1. each rank's residual per kind of work, against its own prediction, its peers and its mates (residuals.py);
2. a two-sided CUSUM per (rank, kind) and over all kinds together (sequential.py);
3. where one fires, the level since the onset, estimated by medians, decides: a new verdict, a revision of the open one (same
   number, new speed), its closing, or nothing (the deviation is smaller than `least_slowdown`);
4. learning: the noise per kind, and a bounded baseline per healthy (rank, kind).

`step` is pure: the same iterations give the same verdicts, live or replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

import msgspec

from unskew.analytics.cost import CostModel
from unskew.analytics.learning import Key, learn_baselines, learn_noise
from unskew.analytics.liveness import Suspect
from unskew.analytics.plan import Plan
from unskew.analytics.predictor import Chunk
from unskew.analytics.residuals import ALL, NOBODY, Company, Load, company_of, excess_of, loads
from unskew.analytics.sequential import Seen, Track
from unskew.analytics.suspicion import decide
from unskew.analytics.thresholds import DetectorOptions
from unskew.analytics.verdicts import closed_verdict, lost_verdict, slow_verdict
from unskew.analytics.workload import Work
from unskew.collector.events import IterationJudged, RankRatio, Verdict, VerdictClosed

Verdicts = tuple[Verdict | VerdictClosed, ...]


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """One whole committed iteration: the chunks of the attempt that counted, the micro-batches' work, its time (us)."""

    iteration: int
    epoch: int
    chunks: tuple[Chunk, ...]
    works: tuple[Work, ...]
    measured_us: float
    log_complete: bool


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    judged: IterationJudged
    verdicts: Verdicts = ()


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All that the detector remembers; never changed, only replaced."""

    iteration: int = -1
    company: Company = NOBODY
    layers: dict[int, tuple[int, int]] = {}
    tracks: dict[Key, Track] = {}
    noise: dict[str, float] = {}
    open: dict[int, int] = {}
    next_verdict: int = 1

    @property
    def speeds(self) -> dict[int, dict[str, float]]:
        """rank -> kind -> believed speed, where it is not the healthy one."""
        found: dict[int, dict[str, float]] = {}
        for (rank, kind), track in sorted(self.tracks.items()):
            if track.level and kind != ALL:
                found.setdefault(rank, {})[kind] = exp(-track.level)
        return found


class Detector:
    """`step` with its state held; one per run."""

    def __init__(self, options: DetectorOptions | None = None) -> None:
        self.options = options or DetectorOptions()
        self.state = State()

    @property
    def speeds(self) -> dict[int, dict[str, float]]:
        return self.state.speeds

    def observe(self, committed: Committed, plan: Plan, cost: CostModel, predicted_us: float | None = None) -> Judgement:
        """Judge the next committed iteration. Raises `ValueError` when it is not later than the last."""
        self.state, judgement = step(self.state, committed, plan, cost, self.options, predicted_us=predicted_us)
        return judgement

    def lost(self, suspect: Suspect, iteration: int) -> Verdicts:
        """The verdict on a rank that is dead, hung or frozen; closes what was open against it."""
        self.state, verdicts = lose(self.state, suspect, iteration, self.options)
        return verdicts


def step(
    state: State,
    committed: Committed,
    plan: Plan,
    cost: CostModel,
    options: DetectorOptions,
    *,
    predicted_us: float | None = None,
) -> tuple[State, Judgement]:
    """One committed iteration with a complete log further; the others are for nobody to be judged by (adaptation.py)."""
    now = committed.iteration
    if now <= state.iteration:
        raise ValueError(f"iteration {now} after iteration {state.iteration}: committed iterations are judged once, in order")
    judged = IterationJudged(
        iteration=now,
        epoch=committed.epoch,
        measured_us=round(committed.measured_us),
        predicted_us=None if predicted_us is None else round(predicted_us),
    )
    company = state.company if state.company.digest == plan.digest else company_of(plan)
    seen = loads(committed.chunks, cost)
    layers = {role.rank: (role.first_layer, role.n_layers) for role in plan.roles}
    settled = {rank for rank in seen if rank in layers and layers[rank] == state.layers.get(rank)}
    after = msgspec.structs.replace(state, iteration=now, company=company, layers={**state.layers, **layers})
    tracks = _watch(after, seen, settled, options)
    after = msgspec.structs.replace(after, tracks=tracks, noise=learn_noise(state.noise, tracks, now, options))
    ratios = tuple(_ratio(rank, load, after, options) for rank, load in seen.items())
    verdicts: list[Verdict | VerdictClosed] = []
    for rank in sorted(settled):
        after, found = _decide(after, rank, options)
        verdicts += found
    after = msgspec.structs.replace(after, tracks=learn_baselines(after.tracks, after.open.keys(), now, options))
    return after, Judgement(judged=msgspec.structs.replace(judged, ranks=ratios), verdicts=tuple(verdicts))


def lose(state: State, suspect: Suspect, iteration: int, options: DetectorOptions) -> tuple[State, Verdicts]:
    """Forget a lost rank and say so."""
    number = state.next_verdict
    found: list[Verdict | VerdictClosed] = [lost_verdict(number, suspect, iteration, options.digest)]
    if suspect.rank in state.open:
        reason = f"rank {suspect.rank} was lost ({suspect.how})"
        found.append(
            VerdictClosed(verdict=state.open[suspect.rank], until_iteration=iteration, at_iteration=iteration, reason=reason)
        )
    return msgspec.structs.replace(
        state,
        tracks={key: track for key, track in state.tracks.items() if key[0] != suspect.rank},
        open={rank: verdict for rank, verdict in state.open.items() if rank != suspect.rank},
        layers={rank: layers for rank, layers in state.layers.items() if rank != suspect.rank},
        next_verdict=number + 1,
    ), tuple(found)


def _watch(state: State, seen: Mapping[int, Load], settled: set[int], options: DetectorOptions) -> dict[Key, Track]:
    """Tracks after this iteration. A rank on new layers is not judged in its first iteration there; its tests begin anew."""
    now, company = state.iteration, state.company
    tracks = dict(state.tracks)
    for rank, load in seen.items():
        for kind in load.residual:
            track = tracks.get((rank, kind), Track.fresh(now))
            tracks[rank, kind] = track if rank in settled else msgspec.structs.replace(track.restarted(now), recent=())
    own = {(rank, kind): value - tracks[rank, kind].baseline for rank in settled for kind, value in seen[rank].residual.items()}
    unexplained = {key: value - tracks[key].level for key, value in own.items()}
    for (rank, kind), value in own.items():
        excess = excess_of(rank, kind, value, unexplained, company)
        sigma = max(state.noise.get(kind, 0.0), options.sigma_floor)
        tracks[rank, kind] = tracks[rank, kind].advance(
            Seen(now, excess), sigma, slack=options.slack, winsor=options.winsor, window=options.window
        )
    return tracks


def _decide(state: State, rank: int, options: DetectorOptions) -> tuple[State, Verdicts]:
    """What the rank's tests say now: nothing, a verdict (new or revised), or the end of one."""
    mine = {kind: track for (owner, kind), track in state.tracks.items() if owner == rank}
    accused = rank in state.open
    change = decide(mine, accused=accused, options=options)
    if change is None:
        return state, ()
    now = state.iteration
    levels = {kind: change.levels.get(kind, 0.0) for kind in mine}
    news = max(abs(levels[kind] - track.level) for kind, track in mine.items() if kind != ALL) >= options.sigma_floor
    believed = {
        (rank, kind): msgspec.structs.replace(track.restarted(now), level=levels[kind] if news else track.level)
        for kind, track in mine.items()
    }
    state = msgspec.structs.replace(state, tracks={**state.tracks, **believed})
    if not news:
        return state, ()
    if not change.levels:
        closed = closed_verdict(state.open[rank], rank, change, now)
        return msgspec.structs.replace(state, open={r: n for r, n in state.open.items() if r != rank}), (closed,)
    number = state.open.get(rank, state.next_verdict)
    victims = {*state.company.peers[rank], *state.company.mates[rank]}
    sigma = max(state.noise.get(change.test, 0.0), options.sigma_floor)
    kinds = len(mine.keys() - {ALL})
    verdict = slow_verdict(number, rank, change, kinds=kinds, victims=victims, at=now, sigma=sigma, options=options)
    return msgspec.structs.replace(
        state, open={**state.open, rank: number}, next_verdict=max(state.next_verdict, number + 1)
    ), (verdict,)


def _ratio(rank: int, load: Load, state: State, options: DetectorOptions) -> RankRatio:
    """`score` is the highest sum of the rank's tests over the threshold: above 1.0 it decides."""
    tracks = [state.tracks[rank, kind] for kind in load.residual]
    sums = [track.up.sum for track in tracks] + [track.down.sum for track in tracks if rank in state.open]
    ratio = {kind: round(exp(value), 4) for kind, value in load.residual.items()}
    return RankRatio(
        rank=rank,
        measured_us=round(load.measured_us),
        predicted_us=round(load.predicted_us),
        f=ratio.get("F"),
        b=ratio.get("B"),
        w=ratio.get("W"),
        score=round(max(sums) / options.threshold, 3),
    )
