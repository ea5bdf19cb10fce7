"""The proofs can fail: what `check` and `rebuild` say of a log that lacks something or answers otherwise."""

from __future__ import annotations

from pathlib import Path

from unskew.collector.events import HostClock
from unskew.collector.files.segment import flush, segment_name, telemetry_line
from unskew.collector.paths import Store
from unskew.collector.service.check import check
from unskew.collector.service.rebuild import RebuildDigests


def test_a_seq_that_is_nowhere_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = store.spool("r") / "rank-0000.1"
    folder.mkdir(parents=True)
    lines = [telemetry_line(seq, 1_700_000_000_000_000, HostClock(node="n", offset_us=2, within_us=1)) for seq in (0, 1, 3)]
    (folder / segment_name(0)).write_bytes(flush(b"".join(lines)))
    assert [one.sentence for one in check(store, mend=False).findings] == ["run r: writer rank-0000.1 lacks 1 lines"]


def test_a_view_that_answers_otherwise_is_named() -> None:
    was = {"runs": (1, "7"), "spans": (2, "8"), "plans": (3, "9")}
    rebuilt = RebuildDigests(before=was, after={**was, "spans": (2, "0")}, database={**was, "plans": (4, "9")})
    assert rebuilt.different == ("spans", "plans")
