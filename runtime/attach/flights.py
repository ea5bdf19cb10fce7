"""The flight recorder of a rank that stands still: its process groups, and the last operation that it has launched in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unskew.collector.events import CollectiveRecorded, GroupRecorded


def last_flights(dump: bytes, members: Mapping[str, tuple[int, ...]], rank: int) -> list[GroupRecorded | CollectiveRecorded]:
    """Of a dump as JSON, empty = there is none; nothing where a version of torch writes another form."""
    try:
        entries = json.loads(dump or b"{}").get("entries", ())
        last = {(entry["process_group"][0], bool(entry["is_p2p"])): entry for entry in entries}
        launched = [_launched(rank, entry) for entry in last.values()]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return []
    groups = {one.group: one.group_description for one in launched}
    return [
        *(
            GroupRecorded(rank=rank, group=name, group_description=description, members=members.get(name, ()))
            for name, description in groups.items()
        ),
        *launched,
    ]


def _launched(rank: int, entry: Mapping[str, Any]) -> CollectiveRecorded:
    return CollectiveRecorded(
        rank=rank,
        record=int(entry["record_id"]),
        group=str(entry["process_group"][0]),
        group_description=str(entry["process_group"][1]),
        group_seq=int(entry["collective_seq_id"]),
        op=str(entry["profiling_name"]),
        state=entry["state"],
        p2p_seq=int(entry["p2p_seq_id"]),
        is_p2p=bool(entry["is_p2p"]),
    )
