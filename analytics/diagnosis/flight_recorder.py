"""Which ranks did not join which collective: from the flight recorders of a job that makes no progress.

A flight recorder's dump names the operations that its rank has launched and that have not come to an end. Steps:

1. A rank waits in its oldest such operation. It waits for the members of that group who have not launched it: they have no
   entry for it, and the number of their last one, where it is known, is smaller. A message waits for its other side.
2. Who is waited for, and waits for nobody, is a culprit: it has launched nothing that is open, or is in an operation that
   all have joined and that does not end (its device has stopped), or has left no dump at all.
3. Who waits, along the chain, for a culprit is a victim. A ring of ranks that wait for each other has no culprit: the ranks
   disagree on what comes next, and nobody is named.

A group is a name and its members: groups that were split off together share a name. Messages are recorded with the numbers
that ranks have within their group; here all ranks are global.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from unskew.collector.events import CollectiveRecorded, GroupRecorded

_MESSAGE = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")

_MembersOf = Callable[[CollectiveRecorded], tuple[int, ...]]


class CollectiveWait(msgspec.Struct, frozen=True, kw_only=True):
    """`rank` has launched `op`, number `group_seq` of `group`; `missing` of its `members` have not. Nobody missing = it does
    not end."""

    rank: int
    op: str
    group: str
    description: str
    group_seq: int
    missing: tuple[int, ...]
    members: tuple[int, ...] = ()


class HangDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds everybody up. `sentences`: for each operation that culprits did not join, who waits in it, then what the
    culprits do; `abstained` is why nobody is named."""

    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    sentences: tuple[str, ...]
    waits: tuple[CollectiveWait, ...]
    abstained: str = ""


def explain(entries: Iterable[CollectiveRecorded], groups: Iterable[GroupRecorded]) -> HangDiagnosis:
    """The standstill that the dumps show; ranks without a dump are those that only others' groups know."""
    group_events = list(groups)
    pending: dict[int, list[CollectiveRecorded]] = defaultdict(list)
    for entry in entries:
        if entry.state != "completed" and not entry.retired:
            pending[entry.rank].append(entry)
    members_of = _members_of(group_events)
    dumped = {event.rank for event in group_events} | set(pending)
    known = _last_launched(group_events, pending)
    launched = {
        (entry.group, _number(entry), entry.rank) for of_rank in pending.values() for entry in of_rank if not entry.is_p2p
    }

    def missing(entry: CollectiveRecorded) -> tuple[int, ...]:
        if entry.is_p2p:
            return _other_side(entry, members_of, pending)
        return tuple(
            rank
            for rank in members_of(entry)
            if (entry.group, entry.group_seq, rank) not in launched and known.get((entry.group, rank), -1) < entry.group_seq
        )

    waits = tuple(
        CollectiveWait(
            rank=rank, op=_with_global_ranks(oldest.op, members_of(oldest)), group=oldest.group,
            description=oldest.group_description, group_seq=_number(oldest), missing=missing(oldest),
            members=members_of(oldest),
        )
        for rank, of_rank in sorted(pending.items())
        for oldest in [min(of_rank, key=lambda entry: (entry.created_us or 0, entry.record))]
    )  # fmt: skip
    return _judge(waits, dumped)


def in_progress(
    flights: Sequence[CollectiveRecorded | GroupRecorded], waiting: Collection[int]
) -> tuple[list[CollectiveRecorded], list[GroupRecorded]]:
    """The last operations of each rank and group that may be in progress, and how far each rank is in its groups; from
    recorders that never note an end (Gloo's). What a rank that waits for nobody has launched is over, and so is a collective
    that all have launched; a message that was sent is waited for only by who waits for nothing else."""
    launched = [one for one in flights if isinstance(one, CollectiveRecorded)]
    groups = [one for one in flights if isinstance(one, GroupRecorded)]
    members_of = _members_of(groups)
    last = {(one.group, one.rank): one.group_seq for one in launched if not one.is_p2p}

    def is_open(one: CollectiveRecorded) -> bool:
        everybody = [last.get((one.group, rank), -1) for rank in members_of(one)]
        return one.rank in waiting and (one.is_p2p or not everybody or min(everybody) < one.group_seq)

    found = [one for one in launched if is_open(one)]
    beside = {one.rank for one in found if not _is_send(one)}
    found = [one for one in found if not (_is_send(one) and one.rank in beside)]
    far = [GroupRecorded(rank=rank, group=group, last_enqueued=number) for (group, rank), number in last.items()]
    return found, [*groups, *far]


def _is_send(one: CollectiveRecorded) -> bool:
    message = _MESSAGE.search(one.op)
    return message is not None and message[1] == "send"


def _members_of(groups: Iterable[GroupRecorded]) -> _MembersOf:
    """An entry -> the global ranks of its group, in the group's order: as its own rank knows them, else another member."""
    known = {(event.group, event.rank): event.members for event in groups if event.members}
    of_name: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for (name, _), members in known.items():
        of_name[name].append(members)

    def members_of(entry: CollectiveRecorded) -> tuple[int, ...]:
        others = (members for members in of_name.get(entry.group, ()) if entry.rank in members)
        return known.get((entry.group, entry.rank)) or next(others, ())

    return members_of


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


def _sides(op: str, members: Sequence[int]) -> tuple[str, int, str, int] | None:
    """What a message is (send or recv), and the global ranks on both sides of its arrow; None when `op` is none."""
    found = _MESSAGE.search(op)
    if found is None or max(own := int(found[2]), peer := int(found[4])) >= len(members):
        return None
    return found[1], members[own], found[3], members[peer]


def _with_global_ranks(op: str, members: Sequence[int]) -> str:
    message = _sides(op, members)
    return op if message is None else _MESSAGE.sub("{} {}{}{}".format(*message), op, count=1)


def _other_side(
    entry: CollectiveRecorded, members_of: _MembersOf, pending: Mapping[int, list[CollectiveRecorded]]
) -> tuple[int, ...]:
    """The peer of a message, unless it has launched its side (a message of the same number reversed)."""
    message = _sides(entry.op, members_of(entry))
    if message is None:
        return ()
    kind, own, _, peer = message
    mirrored = ("recv" if kind == "send" else "send", peer, own)
    met = any(
        side is not None and (side[0], side[1], side[3]) == mirrored
        for other in pending.get(peer, ())
        if other.is_p2p and other.group == entry.group and other.p2p_seq == entry.p2p_seq
        for side in [_sides(other.op, members_of(other))]
    )
    return () if met else (peer,)


def _judge(waits: tuple[CollectiveWait, ...], dumped: set[int]) -> HangDiagnosis:
    waits_for = {wait.rank: set(wait.missing) for wait in waits}
    own = {wait.rank: wait for wait in waits}
    culprits = {rank for missing in waits_for.values() for rank in missing if not waits_for.get(rank)}
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
        sentences=(*_not_joined(waits, culprits), *_states(culprits, own, dumped)),
        waits=waits,
        abstained=abstained,
    )


def _not_joined(waits: Iterable[CollectiveWait], culprits: set[int]) -> Iterator[str]:
    """A sentence for each operation of a group that culprits did not join."""
    waiting: dict[tuple[object, ...], list[CollectiveWait]] = defaultdict(list)
    for wait in waits:
        if culprits & set(wait.missing):
            waiting[wait.group, wait.members, wait.op, wait.group_seq, wait.missing].append(wait)
    for same in waiting.values():
        one, ranks = same[0], [wait.rank for wait in same]
        group = f"{one.description} ({named_ranks(one.members)})" if one.members else one.description
        yield (
            f"{named_ranks(culprits & set(one.missing))} did not join {one.op} #{one.group_seq} of {group}, "
            f"in which {named_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
        )


def _states(culprits: set[int], own: Mapping[int, CollectiveWait], dumped: set[int]) -> Iterator[str]:
    """What the culprits do, a sentence for those who do the same."""
    doing: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(culprits):
        if (wait := own.get(rank)) is not None:
            state = f"in {wait.op} #{wait.group_seq} of {wait.description}, which all have joined and which does not end: "
        else:
            state = "nothing in progress: " if rank in dumped else "no dump: "
        doing[state].append(rank)
    for state, ranks in doing.items():
        yield state + named_ranks(ranks)


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks in a sentence, neighbours as ranges.

    >>> named_ranks([3]), named_ranks([0, 1, 2, 6])
    ('rank 3', 'ranks 0-2, 6')
    """
    ordered = sorted(ranks)
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return f"rank{'s' * (len(ordered) != 1)} " + ", ".join("-".join(map(str, one)) for one in ranges)


def _behind(waits_for: Mapping[int, set[int]], culprits: set[int]) -> set[int]:
    """Everybody whose chain of waiting leads to a culprit."""
    found = set(culprits)
    while True:
        more = {rank for rank, onto in waits_for.items() if rank not in found and onto & found}
        if not more:
            return found
        found |= more
