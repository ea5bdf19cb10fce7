"""Which ranks did not join which collective: from the flight recorders of a job that makes no progress.

A flight recorder's dump names the operations that its rank has launched and that have not come to an end. Steps:

1. A rank waits in its oldest such operation. It waits for the members of that group who have not launched it: they have no
   entry for it, and the number of their last one, where it is known, is smaller. A message waits for its other side.
2. Who is waited for, and waits for nobody, is a culprit: it has launched nothing that is open, or is in an operation that
   all have joined and that does not end (its device has stopped), or has left no dump at all.
3. Who waits, along the chain, for a culprit is a victim. A ring of ranks that wait for each other has no culprit: the ranks
   disagree on what comes next, and nobody is named.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from unskew.collector.events import CollectiveRecorded, GroupRecorded

_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class CollectiveWait(msgspec.Struct, frozen=True, kw_only=True):
    """`rank` has launched `op`, number `group_seq` of `group`; `missing` members have not. Nobody missing = it does not end."""

    rank: int
    op: str
    group: str
    description: str
    group_seq: int
    missing: tuple[int, ...]


class HangDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds everybody up. `why` has a sentence per culprit; `abstained` is why nobody is named."""

    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    why: dict[int, str]
    waits: tuple[CollectiveWait, ...]
    abstained: str = ""


def explain(entries: Iterable[CollectiveRecorded], groups: Iterable[GroupRecorded]) -> HangDiagnosis:
    """The standstill that the dumps show; ranks without a dump are those that only others' groups know."""
    group_events = list(groups)
    pending: dict[int, list[CollectiveRecorded]] = defaultdict(list)
    for entry in entries:
        if entry.state != "completed" and not entry.retired:
            pending[entry.rank].append(entry)
    members = {event.group: event.members for event in group_events if event.members}
    dumped = {event.rank for event in group_events} | set(pending)
    known = _last_launched(group_events, pending)
    launched = {
        (entry.group, _number(entry), entry.rank) for of_rank in pending.values() for entry in of_rank if not entry.is_p2p
    }

    def missing(entry: CollectiveRecorded) -> tuple[int, ...]:
        of_group = members.get(entry.group, ())
        if entry.is_p2p:
            return _other_side(entry, of_group, pending)
        return tuple(
            rank
            for rank in of_group
            if (entry.group, entry.group_seq, rank) not in launched and known.get((entry.group, rank), -1) < entry.group_seq
        )

    waits = tuple(
        CollectiveWait(
            rank=rank, op=oldest.op, group=oldest.group, description=oldest.group_description,
            group_seq=_number(oldest), missing=missing(oldest),
        )
        for rank, of_rank in sorted(pending.items())
        for oldest in [min(of_rank, key=lambda entry: (entry.created_us or 0, entry.record))]
    )  # fmt: skip
    return _judge(waits, dumped)


def _number(entry: CollectiveRecorded) -> int:
    return entry.p2p_seq if entry.is_p2p and entry.p2p_seq is not None else entry.group_seq


def _last_launched(
    groups: Iterable[GroupRecorded], pending: Mapping[int, list[CollectiveRecorded]]
) -> dict[tuple[str, int], int]:
    """(group, rank) -> number of the last collective the rank is known to have launched there."""
    last: dict[tuple[str, int], int] = {}
    for event in groups:
        if event.group and event.last_enqueued is not None:
            last[event.group, event.rank] = event.last_enqueued
    for rank, entries in pending.items():
        for entry in entries:
            if not entry.is_p2p:
                last[entry.group, rank] = max(last.get((entry.group, rank), -1), entry.group_seq)
    return last


def _other_side(
    entry: CollectiveRecorded, members: tuple[int, ...], pending: Mapping[int, list[CollectiveRecorded]]
) -> tuple[int, ...]:
    """The peer of a message, unless it has launched its side (a message of the same number reversed)."""
    found = _MESSAGE.search(entry.op)
    if found is None or not members:
        return ()
    kind, own, peer = found[1], int(found[2]), int(found[3])
    if max(own, peer) >= len(members):
        return ()
    mirrored = f"recv {peer}<-{own}" if kind == "send" else f"send {peer}->{own}"
    sides = pending.get(members[peer], ())
    met = any(
        other.is_p2p
        and other.group == entry.group
        and other.p2p_seq == entry.p2p_seq
        and any(one in other.op for one in mirrored)
        for other in sides
    )
    return () if met else (members[peer],)


def _judge(waits: tuple[CollectiveWait, ...], dumped: set[int]) -> HangDiagnosis:
    waits_for = {wait.rank: set(wait.missing) for wait in waits}
    own = {wait.rank: wait for wait in waits}
    wanted: dict[int, list[CollectiveWait]] = defaultdict(list)
    for wait in waits:
        for rank in wait.missing:
            wanted[rank].append(wait)
    culprits = {rank for rank in wanted if not waits_for.get(rank)}
    abstained = ""
    if not culprits:
        standing = sorted(own)
        abstained = (
            f"ranks {standing} wait and nobody is outstanding: either they wait for each other in different operations, or all "
            "have launched one that does not end; the devices' states or stacks would show which"
            if standing
            else "no operation is in progress in any dump"
        )
    return HangDiagnosis(
        culprits=tuple(sorted(culprits)),
        victims=tuple(sorted(_behind(waits_for, culprits) - culprits)),
        why={rank: _why(wanted[rank], own.get(rank), rank in dumped) for rank in sorted(culprits)},
        waits=waits,
        abstained=abstained,
    )


def _why(wanted: list[CollectiveWait], own: CollectiveWait | None, has_dump: bool) -> str:
    first = min(wanted, key=lambda wait: wait.rank)
    names = ", ".join(str(wait.rank) for wait in wanted)
    if own is not None:
        state = f"is itself in {own.op} #{own.group_seq} of {own.description}, which all have joined and which does not end"
    else:
        state = "has nothing in progress itself" if has_dump else "has left no dump"
    return f"did not join {first.op} #{first.group_seq} of {first.description}, in which {names} wait, and {state}"


def _behind(waits_for: Mapping[int, set[int]], culprits: set[int]) -> set[int]:
    """Everybody whose chain of waiting leads to a culprit."""
    found = set(culprits)
    while True:
        more = {rank for rank, onto in waits_for.items() if rank not in found and onto & found}
        if not more:
            return found
        found |= more
