"""The contract of docs/reference/store.md as tests that any store must pass; subclass `StoreContract`, give it a `backend`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import pytest

from unskew.collector.events import Control, Event, Note, Span, Telemetry
from unskew.collector.write.control_stream import VersionConflict

LEAST_PER_S = 500


class Stream(Protocol):
    def append(self, expected_version: int, events: Sequence[Control], *, actor: str) -> int: ...


class Backend(Protocol):
    """One run of one store. `refused` is what a second writer of a stream may get instead of a conflict."""

    refused: type[Exception]

    def write(self, writer: str, events: Sequence[Telemetry]) -> None:
        """Hand over `events` as the next of `writer`, durable against a kill when it returns."""

    def stream(self, stream: str) -> Stream:
        """A handle to a control stream; may raise `refused` while another lives."""

    def replay(self) -> None:
        """Hand everything that was written over once more, as after a crash between writing and remembering."""

    def events(self, writer: str) -> list[tuple[int, Event]]:
        """(seq, event) of a writer, in order."""

    def versions(self, stream: str) -> list[tuple[int, Event]]:
        """(version, event) of a stream, in order."""


def span(number: int) -> Span:
    return Span(kind="F", device="d", rank=0, plan_version=0, attempt=0, iteration=number // 10, start_us=number, wall_us=1)


def note(text: str) -> Note:
    return Note(text=text, by="ada")


class BadNote(Note, frozen=True, kw_only=True, tag="note@1"):
    """One that cannot be encoded."""

    more: object = None


class StoreContract:
    """What a store promises."""

    def test_a_writers_events_come_back_in_order_each_with_its_number(self, backend: Backend) -> None:
        for first in (0, 30, 60):
            backend.write("rank-0000.1", [span(number) for number in range(first, first + 30)])
        assert backend.events("rank-0000.1") == [(number, span(number)) for number in range(90)]

    def test_an_append_on_an_older_version_is_refused_and_writes_nothing(self, backend: Backend) -> None:
        stream = backend.stream("plan")
        assert stream.append(0, [note("a"), note("b")], actor="c") == 2
        for wrong in (0, 1, 3):
            with pytest.raises(VersionConflict, match=f"at version 2, not {wrong}"):
                stream.append(wrong, [note("x")], actor="c")
        assert stream.append(2, [note("c")], actor="c") == 3
        assert backend.versions("plan") == [(1, note("a")), (2, note("b")), (3, note("c"))]

    def test_a_batch_is_written_whole_or_not_at_all(self, backend: Backend) -> None:
        stream = backend.stream("plan")
        with pytest.raises((TypeError, ValueError)):
            stream.append(0, [note("a"), BadNote(text="b", by="c", more=object())], actor="c")
        assert backend.versions("plan") == []
        assert stream.append(0, [note("a")], actor="c") == 1

    def test_streams_have_versions_of_their_own(self, backend: Backend) -> None:
        for name in ("plan", "analysis/retrain"):
            assert backend.stream(name).append(0, [note(name)], actor="c") == 1
        assert backend.versions("plan") == [(1, note("plan"))]
        assert backend.versions("analysis/retrain") == [(1, note("analysis/retrain"))]

    def test_of_those_that_race_for_a_version_one_wins(self, backend: Backend) -> None:
        won: list[str] = []
        start = threading.Barrier(4)

        def race(name: str) -> None:
            start.wait()
            for version in range(20):
                try:
                    backend.stream("plan").append(version, [note(f"{version} {name}")], actor=name)
                except (VersionConflict, backend.refused):
                    continue
                won.append(f"{version} {name}")

        threads = [threading.Thread(target=race, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = backend.versions("plan")
        assert [version for version, _ in kept] == list(range(1, len(kept) + 1))
        assert sorted(won) == sorted(event.text for _, event in kept if isinstance(event, Note))
        assert won

    def test_writers_side_by_side_lose_nothing(self, backend: Backend) -> None:
        def write(writer: str) -> None:
            for first in range(0, 200, 20):
                backend.write(writer, [span(number) for number in range(first, first + 20)])

        writers = [f"rank-{rank:04d}.1" for rank in range(4)]
        threads = [threading.Thread(target=write, args=(writer,)) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for writer in writers:
            assert backend.events(writer) == [(number, span(number)) for number in range(200)]

    def test_a_replay_changes_nothing(self, backend: Backend) -> None:
        backend.write("rank-0000.1", [span(number) for number in range(50)])
        backend.stream("plan").append(0, [note("a"), note("b")], actor="c")
        before = backend.events("rank-0000.1"), backend.versions("plan")
        for _ in range(2):
            backend.replay()
            assert (backend.events("rank-0000.1"), backend.versions("plan")) == before

    @pytest.mark.limit(120)
    def test_it_takes_hundreds_of_events_a_second_on_a_busy_machine(self, backend: Backend) -> None:
        began_s, count = time.monotonic(), 10_000
        for first in range(0, count, 50):
            backend.write("rank-0000.1", [span(number) for number in range(first, first + 50)])
        assert len(backend.events("rank-0000.1")) == count
        assert count / (time.monotonic() - began_s) >= LEAST_PER_S
