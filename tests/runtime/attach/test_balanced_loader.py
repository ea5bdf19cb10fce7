"""What `session.balance` says of its samples to whoever watches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from unskew.analytics.core.division import ahead
from unskew.collector.events import SamplesDrawn, Telemetry
from unskew.collector.paths import Store
from unskew.runtime.attach.asked.plan_file import ACTS
from unskew.runtime.attach.balance import BalancedLoader, Lengths

EACH, BATCHES, WINDOW = 4, 120, 8
LENGTHS = [1 + number * 7919 % 1000 for number in range(EACH * BATCHES)]


class Session:
    """Of one rank, whose loop begins with its second batch."""

    def __init__(self, folder: Path) -> None:
        self.store, self.run, self.reports, self.begun = Store(folder), "run", list[SamplesDrawn](), False

    def loop(self) -> Any:
        return SimpleNamespace(plan_version=0, iteration=0, under=lambda *_: None) if self.begun else None

    def emit(self, event: Telemetry) -> None:
        if isinstance(event, SamplesDrawn):
            self.reports.append(event)


def drawn(folder: Path, length: Lengths) -> list[SamplesDrawn]:
    session = Session(folder)
    loader: DataLoader[int] = DataLoader([*range(len(LENGTHS))], batch_size=EACH)  # type: ignore[arg-type]
    for _ in BalancedLoader(session, loader, length=length, window=WINDOW):
        session.begun = True
    return session.reports


def test_the_lengths_of_half_of_what_is_said_ahead_are_known_at_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ACTS, "1")
    reports, coming, whole = (
        drawn(tmp_path, LENGTHS),
        (),
        [tuple(LENGTHS[at : at + EACH]) for at in range(0, len(LENGTHS), EACH)],
    )
    assert [batch for one in reports for batch in one.batches] == whole[1:]
    for at, one in enumerate(reports, start=2):
        coming = one.coming or coming[len(one.batches) :]
        assert [*coming] == whole[at : at + len(coming)]
        assert len(coming) >= min(ahead(WINDOW, EACH) // 2, len(whole) - at)
    assert sum(len(one.coming) for one in reports) < 2.5 * BATCHES


def test_no_sample_is_read_before_its_time_to_say_how_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTS, "1")
    assert all(one.coming == () for one in drawn(tmp_path, lambda index: LENGTHS[index]))
