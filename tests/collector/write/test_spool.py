"""Spool, control streams and tail: nothing is lost or torn, and nobody waits for the disk."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.collector.events import Dropped, IterationCommitted, Note, Span
from unskew.collector.files import tail
from unskew.collector.files.loop_parts import LoopPart, line_of
from unskew.collector.files.segment import (
    SpoolSegment,
    control_line,
    flush,
    is_torn,
    segment_name,
    telemetry_line,
    telemetry_lines,
    unpack,
)
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store, StoreError
from unskew.collector.service import ingest
from unskew.collector.service.ingest import unsealed
from unskew.collector.write import spool
from unskew.collector.write.control_stream import ControlStream, VersionConflict
from unskew.collector.write.spool import SpoolWriter


def span(number: int) -> Span:
    return Span(kind="F", device="device-0", rank=0, plan_version=0, attempt=0, iteration=number, start_us=number, wall_us=1)


def note(text: str) -> Note:
    return Note(text=text, by="ada")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_events_come_back_in_order_through_rotated_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "ROTATE_BYTES", 4096)
    writer = SpoolWriter(store, "r", "rank-0000.1", flush_s=0.001)
    follow, entries = Tail(store, "r"), []
    for number in range(1000):
        writer.append(span(number))
        if number % 50 == 0:
            assert writer.hand_over(5.0)
            entries += follow.poll()
    assert writer.close()
    entries += follow.poll()
    assert [entry.seq for entry in entries] == list(range(1000))
    assert [entry.event for entry in entries] == [span(number) for number in range(1000)]
    assert len({entry.segment for entry in entries}) > 5
    assert abs(entries[0].at_us - time.time() * 1e6) < 60e6
    assert follow.poll() == []


def test_a_writer_that_lives_has_a_locked_file_at_any_moment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a full file and the next flush it had none: a collector took the run for over, and removed its spool."""
    monkeypatch.setattr(spool, "ROTATE_EVENTS", 2)
    found, closes = list[bool](), SpoolSegment.close

    def closing(segment: SpoolSegment) -> None:
        closes(segment)
        found.append(unsealed(store, "r").live)

    monkeypatch.setattr(SpoolSegment, "close", closing)
    writer = SpoolWriter(store, "r", "rank-0000.1", flush_s=60.0)
    for number in range(6):
        writer.append(span(number))
        assert writer.hand_over(5.0)
    assert writer.close()
    assert found == [True, True, True, False]


def test_a_file_that_is_let_go_while_a_collector_looks_does_not_end_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "ROTATE_EVENTS", 1)
    writer, sizes = SpoolWriter(store, "r", "rank-0000.1", flush_s=60.0), ingest.final_size
    writer.append(span(0))
    assert writer.hand_over(5.0)
    monkeypatch.setattr(spool, "ROTATE_EVENTS", 2)

    def late(path: Path) -> int | None:
        if path.name == segment_name(1):  # the last that it has listed
            for number in (1, 2):
                writer.append(span(number))
            assert writer.hand_over(5.0)
        return sizes(path)

    monkeypatch.setattr(ingest, "final_size", late)
    assert unsealed(store, "r").live
    writer.close()


def test_what_was_handed_over_is_there_for_others(store: Store) -> None:
    writer = SpoolWriter(store, "r", "rank-0000.1", flush_s=60.0)
    for number in range(100):
        writer.append(span(number))
    assert Tail(store, "r").poll() == []
    assert writer.hand_over(5.0)
    assert len(Tail(store, "r").poll()) == 100
    writer.close()


def test_a_stalled_disk_blocks_no_append_and_the_loss_is_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, well = SpoolSegment.write, threading.Event()

    def write(segment: SpoolSegment, data: bytes) -> int:
        well.wait()
        return whole(segment, data)

    monkeypatch.setattr(SpoolSegment, "write", write)
    writer = SpoolWriter(store, "r", "rank-0000.1", capacity=200, flush_s=0.01)
    writer.append(span(0))
    time.sleep(0.1)
    for number in range(1, 2000):  # one that waited for the disk would wait until the test's limit
        writer.append(span(number))
    assert not writer.hand_over()
    writer.append(span(2000))
    well.set()
    assert writer.close()
    (file,) = (store.spool("r") / "rank-0000.1").iterdir()
    lines = [line for line in file.read_bytes().splitlines() if b'"seq"' in line]
    reports = [msgspec.json.decode(line, type=Dropped) for line in lines if b"dropped@1" in line]
    dropped = [one.count for one in reports]
    assert [one.types for one in reports] == [{"span": n} for n in dropped]
    assert sum(dropped) > 1500
    assert len(lines) - len(dropped) + sum(dropped) == 2001


@pytest.mark.parametrize("device", [object(), "\udcff"], ids=["object", "surrogate"])
def test_an_event_that_json_cannot_hold_costs_only_itself(store: Store, device: object) -> None:
    writer = SpoolWriter(store, "r", "rank-0000.1")
    writer.append(span(0))
    writer.append(msgspec.structs.replace(span(1), device=device))  # type: ignore[arg-type]
    writer.append(span(2))
    assert writer.hand_over(5.0) is False  # all is written, but the log is not complete
    writer.append(span(3))
    assert writer.hand_over(5.0) is True
    writer.close()
    events = [entry.event for entry in Tail(store, "r").poll()]
    assert events == [span(0), span(2), Dropped(count=1, types={"span": 1}), span(3)]


def test_lines_that_are_encoded_together_are_those_of_each() -> None:
    part = LoopPart(
        rank=1, device="d", group="g", iteration=3, begun=(0, 0), ended=(9000, 0), pieces=[("F", (0, 0), (5, 0), 0)],
        packed=[(0, (4, 5))], readings=[(0, 0, 0)],
    )  # fmt: skip
    texts = msgspec.structs.replace(span(7), device='}\n{"type":"x",\u00fc')  # such a text is escaped, so no line can end in it
    lines, next_seq = telemetry_lines(
        5, [(1_234_567, span(0)), (2000, part), (3999, texts), (4000, Dropped(count=1, types={}))]
    )
    apart = [telemetry_line(5, 1234, span(0)), line_of(6, 2, part), telemetry_line(6 + part.n_events, 3, texts)]
    apart.append(telemetry_line(7 + part.n_events, 4, Dropped(count=1, types={})))
    assert (lines, next_seq) == (b"".join(apart), 8 + part.n_events)


def test_a_writer_name_is_used_once(store: Store) -> None:
    first = SpoolWriter(store, "r", "rank-0000.1")
    first.append(span(0))
    first.close()
    with pytest.raises(StoreError, match="written before"):
        SpoolWriter(store, "r", "rank-0000.1")


LINES = [telemetry_line(0, 5, span(0)), control_line(6, "plan", 1, "ada", note("grün\n")), telemetry_line(1, 7, span(1))] * 3


@given(cuts=st.lists(st.integers(0, sum(map(len, LINES))), max_size=12))
@settings(max_examples=60, deadline=None)
def test_however_a_file_grows_each_line_is_given_once(cuts: list[int]) -> None:
    data = b"".join(LINES)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        path = store.spool("r") / "w" / "000000000000.jsonl"
        path.parent.mkdir(parents=True)
        follow, raw, written = Tail(store, "r"), [], 0
        for cut in sorted([*cuts, len(data)]):
            with path.open("ab") as file:
                file.write(data[written:cut])
            written = cut
            raw += [entry.raw for entry in follow.poll()]
            follow = Tail(store, "r", offsets=follow.offsets)  # a collector that starts again
    assert raw == [line.rstrip(b"\n") for line in LINES]


def test_a_backlog_comes_in_small_batches_that_are_fair_to_all_writers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "READ_BYTES", 8_000)
    written = {}
    for writer, files in (("a", 6), ("b", 1), ("c", 6)):
        folder = store.spool("r") / writer
        folder.mkdir(parents=True)
        written[writer] = [telemetry_line(seq, 5, span(seq)) for seq in range(20 * files)]
        for first in range(0, 20 * files, 20):
            (folder / segment_name(first)).write_bytes(b"".join(written[writer][first : first + 20]))
    follow, batches = Tail(store, "r"), []
    while not batches or follow.behind:
        batches.append(follow.poll())
    line_bytes = max(len(line) for lines in written.values() for line in lines)
    assert max(sum(len(entry.raw) for entry in batch) for batch in batches) <= 8_000 + 20 * line_bytes
    assert {entry.writer for entry in batches[0]} == set(written)
    for writer, lines in written.items():
        assert [entry.raw + b"\n" for batch in batches for entry in batch if entry.writer == writer] == lines


def test_control_streams_are_followed_from_now_on_without_reading_the_rest(store: Store) -> None:
    stream = ControlStream(store, "r", "plan", "controller.1")
    stream.append(0, [note("before")], actor="c")
    writer = SpoolWriter(store, "r", "rank-0000.1")
    follow = Tail.of_decisions(store, "r")
    stream.append(1, [note("after")], actor="c")
    writer.append(span(0))
    writer.close()
    assert [entry.event for entry in follow.poll()] == [note("after")]
    stream.close()
    again = ControlStream(store, "r", "plan", "controller.2")
    again.append(2, [note("by the next")], actor="c")
    again.close()
    assert [entry.event for entry in follow.poll()] == [note("by the next")]


def test_unknown_types_are_kept_raw_and_damaged_lines_are_counted(store: Store) -> None:
    path = store.spool("r") / "w" / "000000000000.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(
        b'{"seq":0,"at_us":1,"type":"span@9","kind":[]}\n{"seq":1,"at_\0\n{"seq":2,"at_us":1,"type":"dropped@1","count":3}\n'
    )
    follow = Tail(store, "r")
    unknown, known = follow.poll()
    assert (unknown.event, unknown.raw[-3:]) == (None, b"[]}")
    assert known.event == Dropped(count=3)
    assert [(one.at_byte, one.bytes) for one in follow.damage] == [(None, 14)]


def test_a_diverged_loss_comes_back_as_nan(store: Store) -> None:
    writer = SpoolWriter(store, "r", "rank-0000.1")
    writer.append(
        IterationCommitted(
            iteration=1, plan_version=0, attempt=0, rank=0, loss=math.nan, tokens=5, start_us=0, wall_us=1, log_complete=True
        )
    )
    writer.close()
    (entry,) = Tail(store, "r").poll()
    assert isinstance(entry.event, IterationCommitted)
    assert math.isnan(entry.event.loss)


def test_a_control_stream_refuses_what_was_decided_on_an_older_version(store: Store) -> None:
    stream = ControlStream(store, "r", "analysis/retrain", "job.1")
    assert stream.append(0, [note("a"), note("b")], actor="job") == 2
    with pytest.raises(VersionConflict, match="at version 2, not 1"):
        stream.append(1, [note("c")], actor="job")
    with pytest.raises(StoreError, match="another writer"):
        ControlStream(store, "r", "analysis/retrain", "job.2")
    stream.close()
    again = ControlStream(store, "r", "analysis/retrain", "job.2")
    assert again.append(2, [note("c")], actor="job") == 3
    again.close()
    entries = Tail(store, "r").poll()
    assert [(entry.stream, entry.version, entry.actor) for entry in entries] == [
        ("analysis/retrain", version, "job") for version in (1, 2, 3)
    ]


@pytest.mark.parametrize("failing", ["sync", "cut"])
def test_a_control_stream_in_doubt_takes_nothing_more(store: Store, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """A version whose line may be on disk, or a torn line, is never followed by another from the same writer."""

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    stream = ControlStream(store, "r", "plan", "controller.1")
    stream.append(0, [note("a")], actor="c")
    with monkeypatch.context() as broken:
        if failing == "cut":
            write = SpoolSegment.write
            broken.setattr(SpoolSegment, "write", lambda segment, data: write(segment, data[:9]))
        broken.setattr(SpoolSegment, failing, refuse)
        with pytest.raises(StoreError, match="Input/output error"):
            stream.append(1, [note("in doubt")], actor="c")
    with pytest.raises(StoreError, match="in doubt"):
        stream.append(1, [note("b")], actor="c")
    stream.close()
    again = ControlStream(store, "r", "plan", "controller.2")
    again.append(again.version, [note("c")], actor="c")
    again.close()
    versions = [entry.version for entry in Tail(store, "r").poll()]
    assert versions == list(range(1, len(versions) + 1))


def test_a_disk_that_is_full_for_a_while_does_not_end_a_control_stream(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ControlStream(store, "r", "plan", "controller.1")
    with monkeypatch.context() as full:
        write = SpoolSegment.write
        full.setattr(SpoolSegment, "write", lambda segment, data: write(segment, data[:9]))
        with pytest.raises(StoreError, match="the disk is full"):
            stream.append(0, [note("a")], actor="c")
    assert stream.append(0, [note("b")], actor="c") == 1
    stream.close()
    assert [entry.event for entry in Tail(store, "r").poll()] == [note("b")]


def test_a_control_stream_goes_on_after_its_writer_was_killed(store: Store) -> None:
    """Every version that `append` returned is on disk; a line torn by a lost machine is written over, not continued."""
    code = f"""if True:
        import itertools
        from unskew.collector.events import Note
        from unskew.collector.paths import Path, Store
        from unskew.collector.write.control_stream import ControlStream
        stream = ControlStream(Store(Path({str(store.root)!r})), "r", "plan", "controller.1")
        for number in itertools.count(0, 2):
            print(stream.append(number, [Note(text=str(number), by="x")] * 2, actor="c"), flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while int(child.stdout.readline()) < 40:
            pass
        child.kill()
        newest = max([40, *map(int, child.stdout.read().split())])
    (segment,) = (store.spool("r") / "controller.1@plan").iterdir()
    with segment.open("ab") as file:
        file.write(b'{"seq":999,"at_us":1,"stream":"plan","ver')
    stream = ControlStream(store, "r", "plan", "controller.2")
    assert stream.version in {newest, newest + 2}
    stream.append(stream.version, [note("on")], actor="c")
    stream.close()
    versions = [entry.version for entry in Tail(store, "r").poll()]
    assert versions == list(range(1, stream.version + 1))


BATCHES = [b"".join(telemetry_line(seq, 5, span(seq)) for seq in range(first, first + 3)) for first in (0, 3, 6)]


@given(at=st.integers(0, sum(len(flush(batch)) for batch in BATCHES) - 1), bit=st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_costs_its_own_flush_at_most_and_is_named(at: int, bit: int) -> None:
    whole = b"".join(flush(batch) for batch in BATCHES)
    data = whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]
    unpacked = unpack(data)
    rest = data[unpacked.used :]
    assert unpacked.damaged or not is_torn(rest), "named: passed over, or left behind as what no kill leaves"
    hit = sum(at >= sum(len(flush(batch)) for batch in BATCHES[:number]) for number in (1, 2))
    written = set(b"".join(BATCHES).splitlines())
    assert set(unpacked.lines.splitlines()) <= written, "what is taken was written so"
    others = [batch for number, batch in enumerate(BATCHES) if number != hit]
    assert all(line in unpacked.lines for batch in others for line in batch.splitlines())


@given(st.integers(0, sum(len(flush(batch)) for batch in BATCHES)))
@settings(max_examples=200, deadline=None)
def test_a_file_cut_anywhere_holds_whole_flushes_and_nothing_else(cut: int) -> None:
    data = b"".join(flush(batch) for batch in BATCHES)[:cut]
    unpacked = unpack(data)
    assert unpacked.lines in [b"".join(BATCHES[:count]) for count in range(4)]
    assert not unpacked.damaged
    assert is_torn(data[unpacked.used :])


def test_a_batch_of_decisions_that_a_kill_cut_short_never_was(store: Store) -> None:
    stream = ControlStream(store, "r", "plan", "controller.1")
    stream.append(0, [note("a")], actor="c")
    stream.append(1, [note("b"), note("c")], actor="c")
    stream.close()
    (path,) = (store.spool("r") / "controller.1@plan").iterdir()
    path.write_bytes(path.read_bytes()[:-5])  # "b" is there to the letter
    assert [entry.event for entry in Tail(store, "r").poll()] == [note("a")]
    again = ControlStream(store, "r", "plan", "controller.2")
    assert again.version == 1
    assert again.append(1, [note("d")], actor="c") == 2
    again.close()
    assert [entry.event for entry in Tail(store, "r").poll()] == [note("a"), note("d")]


def test_one_bad_store_path_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"file is a file, a folder"):
        Store.locate(str(tmp_path / "file" / "store"))
    monkeypatch.setenv("UNSKEW_STORE", str(tmp_path / "env"))
    assert Store.locate(None).root == tmp_path / "env"
    assert Store.locate(str(tmp_path)).root == tmp_path
    with pytest.raises(StoreError, match="not allowed"):
        Store(tmp_path).spool("../elsewhere")
