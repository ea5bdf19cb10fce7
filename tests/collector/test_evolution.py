"""Schema evolution: every line that any version ever wrote is read, and no field changes unnoticed."""

from __future__ import annotations

from pathlib import Path

import duckdb
import msgspec
import pytest
from support.store.golden_lines import FOLDER, fields_in, golden

from unskew.collector.events import CONTROL, TELEMETRY, Event, Note, RunStarted, tag_of
from unskew.collector.files import rows, upcasters
from unskew.collector.files.segment import control_line, segment_name, telemetry_line
from unskew.collector.files.tail import Entry, SpoolLines, Tail, decode_event
from unskew.collector.files.upcasters import Upcast, rows_of
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store

TYPES = {tag_of(event): event for event in (*TELEMETRY, *CONTROL)}


@pytest.mark.parametrize("tag", TYPES)
def test_a_type_changes_only_with_a_new_version_or_a_new_default(tag: str) -> None:
    assert golden(TYPES[tag]).exists(), "a new type or version: run python tests/support/store/golden_lines.py"
    own = {field.encode_name for field in msgspec.structs.fields(TYPES[tag])}
    gone = fields_in(golden(TYPES[tag]).read_bytes().splitlines()) - own
    new = own - fields_in(golden(TYPES[tag]).read_bytes().splitlines())
    assert not gone, f"{gone} left {tag}: give it a new version and a step in collector/files/upcasters.py"
    assert not new, f"{new} joined {tag}: with a default run tests/support/store/golden_lines.py, else give it a new version"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda path: path.stem)
def test_what_was_written_once_is_read_for_ever(path: Path) -> None:
    for line in path.read_bytes().splitlines():
        entry = read(line)
        assert entry.event is not None
        assert type(entry.event) in TYPES.values()
        if path.stem in TYPES:
            assert entry.raw == line
            assert encoded(entry, entry.event) == line + b"\n", "written again it is the same to the byte"


def read(line: bytes) -> Entry:
    envelope = msgspec.json.decode(line)
    event = decode_event(line)
    at = {name: envelope.get(name) for name in ("seq", "at_us", "stream", "version", "actor")}
    return Entry(writer="w", segment=0, event=event, raw=line, **at)


def encoded(entry: Entry, event: Event) -> bytes:
    if entry.stream is None:
        return telemetry_line(entry.seq, entry.at_us, event)
    assert entry.version is not None
    return control_line(entry.at_us, entry.stream, entry.version, entry.actor or "", event)


STEPS = (
    Upcast(old="note@-1", new="note@0", renamed={"message": "words"}, removed=("colour",)),
    Upcast(old="note@0", new="note@1", renamed={"words": "text"}, added={"by": "nobody"}),
)
OLD = {
    "note@-1": b'"message":"a \'quoted\' word","colour":"red"',
    "note@0": b'"words":"a \'quoted\' word"',
    "note@1": b'"text":"a \'quoted\' word","by":"nobody"',
}


@pytest.mark.parametrize("tag", OLD)
def test_old_versions_are_read_as_the_newest_by_code_and_by_sql(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    monkeypatch.setattr(upcasters, "STEPS", {step.old: step for step in STEPS})
    line = b'{"seq":1,"at_us":5,"stream":"plan","version":1,"actor":"x","type":"%b",%b}' % (tag.encode(), OLD[tag])
    assert decode_event(line) == Note(text="a 'quoted' word", by="nobody")
    with duckdb.connect(":memory:") as connection:
        rows.create_table(connection, "log")
        rows.insert(connection, "log", "r", [SpoolLines("w", 0, line + b"\n")])
        ((payload,),) = connection.sql(f"select payload from ({rows_of(Note, 'log')})").fetchall()
        assert decode_event(payload.encode()) == Note(text="a 'quoted' word", by="nobody")
        assert connection.sql("select payload from log").fetchall() == [(line.decode(),)], "what was written stays"


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("sleep: 8 ranks have only 2 cores, chunk times of profile steady are emulated", "sleep"),
        ("virtual, as asked", "virtual"),
        ("real: 2 ranks on 2 cores", "cores"),
        ("real, as asked: 2 ranks on 4 GPUs", "gpus"),
        ("imported", None),
    ],
)
def test_a_run_from_before_the_field_tells_its_kind_of_device(device: str, kind: str | None) -> None:
    started = decode_event(
        golden(RunStarted).read_bytes().splitlines()[0].replace(b'"device":"text"', b'"device":"%b"' % device.encode())
    )
    assert isinstance(started, RunStarted)
    assert started.device_kind == kind


def test_a_type_that_nobody_knows_is_kept_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    line = b'{"seq":0,"at_us":1,"type":"novelty@3","rank":2,"new":{"a":[1,2]}}\n'
    path = store.spool("r") / "w" / segment_name(0)
    path.parent.mkdir(parents=True)
    path.write_bytes(line)
    (entry,) = Tail(store, "r").poll()
    assert entry.event is None
    with open_store(store) as reader:
        assert reader.sql("select type, rank, payload->>'new' as new from events").rows() == [("novelty@3", 2, '{"a":[1,2]}')]
