"""The benchmark of tensor parallelism on a small model: what moves is counted to the byte, and both ways of a pass agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from unskew.benchmarks.report import bars
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.runtime import tensor
from unskew.collector.paths import Store
from unskew.runtime.size import ModelSize

pytestmark = [pytest.mark.slow, pytest.mark.limit(120)]


def test_every_part_of_it_on_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "SMALL", ModelSize(n_layers=1, dim=64, heads=8))
    monkeypatch.setattr(tensor, "LARGE", ModelSize(n_layers=12, dim=64, heads=8))
    with bars() as progress:
        figures = tensor.figures(Bench(progress, Store(tmp_path)))
    found = {figure.name.removeprefix("tensor parallelism: "): figure for figure in figures}
    assert len(found) == 6
    assert all(figure.value is not None for figure in found.values())
    for what in ("a layer moves to the other stage", "4/4 -> 5/3 heads on both stages"):
        share = found[f"{what}: bytes that travel, of what is moved"].value
        assert share == pytest.approx(1.0, abs=0.005)
    for heads in ("4/4", "5/3"):
        note = found[f"forward and backward, {heads} heads, of a uniform one by hand"].note
        assert float(note.rsplit(" ", 1)[1]) < 1e-5, "losses differ"
