"""flight-recorder: PyTorch's NCCL flight-recorder dumps, one file per rank, as pickle or JSON.

A pickle is read by an unpickler that refuses every class and function, so that it can only be plain data. The rank is in
the file's name (``..._rank_3``, ``nccl_trace_3``, ``3.pkl``): the last number in it.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from unskew.collector.events import CollectiveRecorded, GroupRecorded, Telemetry
from unskew.collector.formats.imported import LARGEST, FormatError, ImportedRun, source_files
from unskew.collector.formats.text import content, rank_number

_STATES = ("scheduled", "started", "completed")
_JSON = re.compile(rb"\s*\{")


class _PlainData(pickle.Unpickler):
    """Loads numbers, texts, lists, tuples and dicts; anything that would import a name is refused."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump is plain data")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to an object outside of itself ({pid!r})")


def read(path: Path) -> Sequence[ImportedRun]:
    """The dumps of a folder (or one dump) as one run. Raises `FormatError`."""
    files = [path] if path.is_file() else _dumps(path)
    by_rank: dict[int, Path] = {}
    for file in files:
        rank = _rank(file)
        if rank in by_rank:
            raise FormatError(f"{file}: {by_rank[rank].name} is of rank {rank} too, one dump per rank is needed")
        by_rank[rank] = file
    events: list[Telemetry] = []
    versions = set()
    for rank, file in sorted(by_rank.items()):
        dump = _load(file)
        versions.add(str(dump.get("version", "")))
        events += _groups(file, rank, dump)
        events += _entries(file, rank, dump)
    members = {member for event in events if isinstance(event, GroupRecorded) for member in event.members}
    facts = {
        "observed": "collectives in flight",
        "versions": sorted(versions),
        "world_size": max(members | set(by_rank)) + 1,
        "without_dump": sorted(members - set(by_rank)),
    }
    return [ImportedRun(events=events, ranks=len(by_rank), iterations=0, facts=facts)]


def _dumps(folder: Path) -> list[Path]:
    files = [file for file in source_files(folder, "") if re.search(r"\d", file.stem) and not file.name.startswith(".")]
    if not files:
        raise FormatError(f"{folder}: no file in this folder has a rank in its name")
    return files


def _rank(file: Path) -> int:
    numbers = re.findall(r"\d+", file.name.partition(".")[0])
    if not numbers:
        raise FormatError(f"{file}: a dump's name ends in its rank, such as nccl_trace_rank_3")
    return rank_number(str(file), float(numbers[-1]))


def _load(file: Path) -> Mapping[str, Any]:
    raw = content(file)
    if _JSON.match(raw):
        try:
            dump = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{file}: not JSON ({error})") from error
    else:
        try:
            _check_sizes(raw)
            dump = _PlainData(io.BytesIO(raw)).load()
        except Exception as error:  # whatever bytes can make of an unpickler
            raise FormatError(f"{file}: not a pickle of plain data ({error})") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise FormatError(f"{file}: a flight-recorder dump is a dictionary with a list 'entries'")
    return dump


def _check_sizes(raw: bytes) -> None:
    """Raises ValueError for a pickle that names more than it holds: the unpickler makes room for what is named first."""
    for opcode, argument, _ in pickletools.genops(raw):  # it raises for a text that is longer than the file
        if opcode.name.endswith("PUT") and isinstance(argument, int) and argument > len(raw):
            raise ValueError(f"it asks for room for {argument:,} objects in {len(raw):,} bytes")


def _groups(file: Path, rank: int, dump: Mapping[str, Any]) -> Iterator[GroupRecorded]:
    named = [
        entry for entry in dump["entries"] if isinstance(entry, dict) and isinstance(entry.get("process_group"), (list, tuple))
    ]
    name_of = {str(entry.get("pg_id")): str(entry["process_group"][0]) for entry in named if entry["process_group"]}
    for key, config in _table(file, dump, "pg_config").items():
        try:
            name = str(config.get("name", key))
            yield GroupRecorded(
                rank=rank,
                group=name,
                group_description=str(config.get("desc", "")),
                members=tuple(_member(member) for member in _listed(config.get("ranks", ()))),
            )
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FormatError(f"{file}: process group {key!r} has no name, desc and ranks ({error})") from error
    for key, status in _table(file, dump, "pg_status").items():
        try:
            yield GroupRecorded(
                rank=rank,
                group=name_of.get(str(key), ""),
                group_id=str(key),
                last_enqueued=_integer(status.get("last_enqueued_collective")),
                last_started=_integer(status.get("last_started_collective")),
                last_completed=_integer(status.get("last_completed_collective")),
            )
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FormatError(f"{file}: the status of process group {key!r} is not three numbers ({error})") from error


def _table(file: Path, dump: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A dictionary of the dump; older dumps lack it."""
    table = dump.get(name) or {}
    if not isinstance(table, dict):
        raise FormatError(f"{file}: {name} is no dictionary of process groups")
    return table


def _listed(ranks: Any) -> Sequence[Any]:
    """Members are a list, or a list written as text."""
    return re.findall(r"\d+", ranks) if isinstance(ranks, str) else list(ranks)


def _entries(file: Path, rank: int, dump: Mapping[str, Any]) -> Iterator[CollectiveRecorded]:
    for number, entry in enumerate(dump["entries"], start=1):
        try:
            name, description = entry["process_group"]
            state = entry["state"]
            if state not in _STATES:
                raise ValueError(f"state is {state!r}, not one of {', '.join(_STATES)}")
            yield CollectiveRecorded(
                rank=rank,
                record=_whole(entry["record_id"]),
                group=str(name),
                group_description=str(description),
                group_seq=_whole(entry["collective_seq_id"]),
                op=str(entry["profiling_name"]),
                state=state,
                p2p_seq=_integer(entry.get("p2p_seq_id")),
                op_id=_integer(entry.get("op_id")),
                is_p2p=bool(entry.get("is_p2p", False)),
                retired=None if entry.get("retired") is None else bool(entry["retired"]),
                created_us=_from_ns(entry.get("time_created_ns")),
                started_us=_from_ns(entry.get("time_discovered_started_ns")),
                completed_us=_from_ns(entry.get("time_discovered_completed_ns")),
                wall_us=_from_ms(entry.get("duration_ms"), least=0),
                timeout_us=_from_ms(entry.get("timeout_ms")),
                input_sizes=_text(entry.get("input_sizes")),
                output_sizes=_text(entry.get("output_sizes")),
                dtypes=_text(entry.get("input_dtypes")),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise FormatError(f"{file}, entry {number}: {what}") from error


def _whole(value: Any) -> int:
    number = int(value)
    if isinstance(value, float) and number != value:
        raise ValueError(f"{value} is no whole number")
    if abs(number) > LARGEST:
        raise ValueError(f"{number} is too large")
    return number


def _member(value: Any) -> int:
    return rank_number("a member", _whole(value))


def _integer(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _from_ns(value: Any) -> int | None:
    return None if value is None else _whole(int(value) // 1000)


def _from_ms(value: Any, least: int = -LARGEST) -> int | None:
    if value is not None and value < least:
        raise ValueError(f"{value} ms is negative")
    return None if value is None else _whole(round(1000 * value))


def _text(value: Any) -> str:
    return "" if value is None else str(value)
