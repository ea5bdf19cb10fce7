"""Validation on demand: when the log's evidence is not enough, suspects are measured directly, while training waits for them.

A probe is an action of a plan record: a matrix product on each suspect, three or nine times, against the same product on the
same device when the run began; and transfers between the suspects, 16, 32 and 64 MB, in passes in which every rank talks to one
other only, so that the number of passes does not grow with the suspects (Greyhound, section 5.2: a ring of even size takes two
passes, of odd size three).

It is asked for when ranks are slower than their own prediction and bias and would be named, did not their data-parallel or
pipeline peers excuse them: two ranks of one role slowed alike, all pipeline peers of a rank, or a predictor that is wrong.
The probe distinguishes these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from statistics import median

import msgspec

from unskew.collector.command import Command, wrong_name
from unskew.collector.events import CommandRefused, Note, Probed, Span

Pair = tuple[int, int]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure on `ranks`: `repeats` matrix products, and one transfer of each size over each link of their ring."""

    ranks: tuple[int, ...]
    repeats: int = 3
    message_bytes: tuple[int, ...] = (16 << 20, 32 << 20, 64 << 20)


class ProbeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`over`: iterations for which the suspicion must have lasted; `again`: iterations until the next probe;
    `least_slowdown`: of the matrix product, from which a device is called slow; `most`: no more suspects than this share of
    the ranks are probed: a job that is slow everywhere has another cause; `standby_every`: iterations between two
    measurements of a rank on standby.
    """

    over: int = 8
    again: int = 50
    least_slowdown: float = 1.15
    most: float = 0.5
    standby_every: int = 5


def passes(ranks: Sequence[int]) -> tuple[tuple[Pair, ...], ...]:
    """The links of the ring of `ranks` in passes (sender, receiver), no rank twice in a pass: two, or three for an odd ring.

    >>> passes((2, 5, 7))
    (((2, 5),), ((5, 7),), ((7, 2),))
    """
    n = len(ranks)
    if n < 2:
        return ()
    ring = [(ranks[i], ranks[(i + 1) % n]) for i in range(n)]
    if n == 2:
        return (tuple(ring[:1]), tuple(ring[1:]))
    if n % 2 == 0:
        return (tuple(ring[::2]), tuple(ring[1::2]))
    return (tuple(ring[:-1:2]), tuple(ring[1:-1:2]), tuple(ring[-1:]))


def wanted(
    now: int, suspected_ranks: Mapping[int, float], n_ranks: int, last_at: int | None, options: ProbeOptions
) -> tuple[Probe | None, str]:
    """The probe to run after iteration `now`, and why, or why not.

    `suspected_ranks`: rank -> excess (log) of its own time that its data-parallel or pipeline peers excuse
    (`products.suspected_ranks`).
    """
    if not suspected_ranks:
        return None, "nobody is in doubt"
    ranks = tuple(sorted(suspected_ranks))
    names = ", ".join(map(str, ranks))
    if last_at is not None and now - last_at < options.again:
        return None, f"ranks {names} are in doubt and were probed after iteration {last_at}"
    if len(ranks) > options.most * n_ranks:
        return None, f"{len(ranks)} of {n_ranks} ranks are slower than predicted: that is not a device's fault"
    return Probe(ranks=ranks), f"ranks {names} are slower than they were for {options.over} iterations, and excuse each other"


def asked_for(
    command: Command,
    ranks: Collection[int],
    working: Collection[int],
    references: Collection[int],
    *,
    by_replica: bool,
    busy: bool,
) -> Note | CommandRefused:
    """The answer to who asks for a probe. `working`: ranks that live and execute; `references`: those whose product is known
    from the run's beginning; `by_replica`: replicas step by themselves; `busy`: a change of plan is under way."""
    rank = int(command.target) if command.target.isdecimal() else -1
    refusal = wrong_name(command.by)
    if not refusal and rank not in ranks:
        refusal = f"rank {command.target} is not in the run, its ranks are {', '.join(map(str, sorted(ranks)))}"
    elif not refusal and rank not in working:
        refusal = f"rank {rank} executes nothing: it measures itself now and then"
    elif not refusal and rank not in references:
        refusal = f"what rank {rank} took for the product when the run began is not known"
    elif not refusal and by_replica:
        refusal = "replicas that step by themselves have no iteration in which all stand still"
    elif not refusal and busy:
        refusal = "a change of plan is under way: ask again when it is applied"
    return answer(command, refusal)


def answer(command: Command, refusal: str) -> Note | CommandRefused:
    """Who asks for a probe gets it, or is told why not (`refusal`)."""
    if refusal:
        return CommandRefused(command=f"probe {command.target}", by=command.by, reason=refusal, user=command.user)
    why = f": {command.reason}" if command.reason else ""
    return Note(text=f"rank {command.target} is to be probed{why}", by=command.by, user=command.user)


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found: `slowdowns`, rank -> its product's time over the one when the run began; `links` -> bytes per us;
    `cost_us`: the longest that a rank was kept from training.
    """

    slowdowns: dict[int, float]
    links: dict[Pair, float]
    cost_us: int

    def event(self, at_iteration: int, *, beside: bool = False) -> Probed:
        """The result for the log: it was measured before iteration `at_iteration`; `beside` as in `Probed`."""
        return Probed(
            beside=beside,
            at_iteration=at_iteration,
            ranks=tuple(sorted(self.slowdowns)),
            slowdowns={str(rank): round(slowdown, 4) for rank, slowdown in self.slowdowns.items()},
            links=tuple((sender, receiver, round(rate, 3)) for (sender, receiver), rate in self.links.items()),
            cost_us=self.cost_us,
        )


def measured(spans: Iterable[Span], reference: Mapping[int, float]) -> ProbeResult:
    """Read the spans of one probe. `reference`: rank -> us of the product when the run began; others are left out."""
    products: dict[int, list[int]] = {}
    links: dict[Pair, list[float]] = {}
    costs: dict[int, int] = {}
    for span in spans:
        costs[span.rank] = costs.get(span.rank, 0) + span.wall_us
        if span.peer is None:
            if span.compute_us is not None:  # without one the device was warmed up
                products.setdefault(span.rank, []).append(span.compute_us)
        elif span.bytes and span.wall_us:
            links.setdefault((span.peer, span.rank), []).append(span.bytes / span.wall_us)
    return ProbeResult(
        slowdowns={rank: median(us) / reference[rank] for rank, us in sorted(products.items()) if reference.get(rank)},
        links={link: median(rates) for link, rates in sorted(links.items())},
        cost_us=max(costs.values(), default=0),
    )


def side_by_side(products: Mapping[int, Sequence[int]], ranks: Sequence[int], at_iteration: int, cost_us: int) -> Probed | None:
    """The probe of `ranks` where nothing was measured when the run began: the median of one's `products` (us) over the median
    of the others'. None where nobody else was measured."""
    took = {rank: float(median(us)) for rank, us in products.items() if us}
    slowdowns = {}
    for rank in ranks:
        others = [us for other, us in took.items() if other != rank]
        if rank in took and others:
            slowdowns[rank] = took[rank] / max(median(others), 1.0)
    return ProbeResult(slowdowns=slowdowns, links={}, cost_us=cost_us).event(at_iteration, beside=True) if slowdowns else None


def references(
    spans: Iterable[Span], classes: Iterable[Collection[int]] = (), slow: float = inf
) -> tuple[dict[int, float], dict[int, float]]:
    """Rank -> us of its matrix product on a healthy device, from the probe that every rank makes when a run begins. Who took
    `slow` times as long as the median of the others of its class was slow already: that median is its reference. Beside it
    these ranks, and how many times as long they took."""
    products: dict[int, list[int]] = {}
    for span in spans:
        if span.peer is None and span.compute_us:
            products.setdefault(span.rank, []).append(span.compute_us)
    own = {rank: float(median(us)) for rank, us in products.items()}
    healthy = dict(own)
    for ranks in classes:
        for rank in own.keys() & set(ranks):
            others = [own[other] for other in ranks if other != rank and other in own]
            if others and own[rank] >= slow * median(others):
                healthy[rank] = median(others)
    return healthy, {rank: own[rank] / us for rank, us in healthy.items() if us != own[rank]}
