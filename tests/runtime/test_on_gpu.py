"""Ranks that share a GPU; where there is none, only that this is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.training.runtime_runs import SMALL, train

from unskew.collector.events import RunFinished, RunStarted

AT_HAND = torch.cuda.is_available()


@pytest.mark.slow
@pytest.mark.skipif(AT_HAND, reason="there is a GPU at hand")
def test_without_a_gpu_the_run_ends_with_one_sentence(tmp_path: Path) -> None:
    run = train(tmp_path, device="gpu")
    (end,) = run.of(RunFinished)
    assert (end.status, end.iterations) == ("failed", 0)
    assert end.reason == "--device gpu needs a GPU and this node has none, allowed: auto, real, sleep, virtual"


@pytest.mark.skipif(not AT_HAND, reason="there is no GPU at hand")
def test_ranks_that_share_a_gpu_train_what_cores_train(tmp_path: Path) -> None:
    on_cores, on_gpu = (train(tmp_path / device, device=device, checkpoint_every=5) for device in (SMALL.device, "gpu"))
    assert [started.device_kind for started in on_gpu.of(RunStarted)] == ["shared_gpus"]
    assert on_gpu.summary.losses == pytest.approx(on_cores.summary.losses, abs=1e-8)
