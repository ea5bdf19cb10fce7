"""The benches of ranks by themselves: our executor beside torch's, and what a change of plan leaves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from unskew.benchmarks.report import bars
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.runtime import changes, executor
from unskew.collector.paths import Store

pytestmark = [pytest.mark.slow, pytest.mark.limit(120)]


def test_torchs_pipeline_computes_what_ours_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "TURNS", executor.WARM + 4)
    with bars() as progress:
        small = msgspec.structs.replace(executor.OPTIONS, layers=2, dim=32, heads=2, tokens=32, micro_batches=4)
        figures = executor.figures(Bench(progress, Store(tmp_path)), small)
    assert len(figures) == 2
    for figure in figures:
        assert figure.value is not None
        assert float(figure.note.rsplit(" ", 1)[1]) < 1e-6, "losses differ"


@pytest.mark.usefixtures("forked")
def test_a_change_is_predicted_and_its_throughput_is_of_what_is_left(tmp_path: Path) -> None:
    with bars() as progress:
        bench = Bench(progress, Store(tmp_path))
        base = msgspec.structs.replace(changes.OPTIONS, device="virtual", iterations=40)
        error, share = changes.figures(bench, [changes.SCENARIOS[0]], base)
    assert error.value is not None
    assert error.value < 0.1
    assert share.value is not None
    assert 85 < share.value < 102, "the first plan shares work out by counts: a later one that goes by lengths can pass 100"
