"""What ranks compute on, from what a node has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from unskew.analytics.detector.options import SHARED_MACHINE, options_for
from unskew.runtime.control.allowed import check
from unskew.runtime.node.gpus import NodeGpus, node_gpus
from unskew.runtime.options import OptionsError, RunOptions
from unskew.runtime.placement import computes_bfloat16, place

H100 = ("H100", 80 * 2**30)


def asked(device: Any) -> RunOptions:
    return RunOptions(pp=2, dp=2, device=device)


def test_ranks_share_a_gpu_where_that_is_asked_for() -> None:
    placement = place(asked("gpu"), 1, [H100])
    assert (placement.device, placement.kind, placement.most_ranks) == ("real", "shared_gpus", 4)
    assert placement.why == "real: 4 ranks share 1 GPU, as asked"
    assert [placement.gpu_of(rank) for rank in range(4)] == [0] * 4
    assert placement.classes == ("H100",) * 4
    assert placement.rank_bytes == H100[1] // 4
    assert options_for(placement.kind) == SHARED_MACHINE


def test_ranks_take_turns_on_several_gpus() -> None:
    placement = place(asked("gpu"), 3, [H100, H100, ("A100", 40 * 2**30)])
    assert [placement.gpu_of(rank) for rank in range(4)] == [0, 1, 2, 0]
    assert placement.classes == ("H100", "H100", "A100", "H100")
    assert placement.rank_bytes == 20 * 2**30


@pytest.mark.parametrize("device", ["auto", "real", "gpu"])
def test_a_gpu_to_each_rank_is_its_own(device: str) -> None:
    placement = place(asked(device), 8, [H100] * 8)
    assert (placement.kind, placement.most_ranks, placement.rank_bytes) == ("gpus", 8, H100[1])
    assert [placement.gpu_of(rank) for rank in (0, 3, 7)] == [0, 3, 7]


def test_nobody_shares_a_gpu_who_was_not_asked() -> None:
    assert place(asked("real"), 1, [H100]).kind == "cores"
    assert place(asked("auto"), 1, [H100]).gpu_of(0) is None


def test_without_a_gpu_one_sentence_says_so() -> None:
    with pytest.raises(OptionsError, match=r"^--device gpu needs a GPU and this node has none, allowed: auto, real, sleep"):
        place(asked("gpu"), 0)


def test_gpus_have_no_emulated_links() -> None:
    with pytest.raises(OptionsError, match="--link-us"):
        check(RunOptions(device="gpu", link_us=5))


def test_gpus_are_counted_in_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert node_gpus() == NodeGpus(2)


def test_gpus_that_cannot_be_counted_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", broken)
    assert node_gpus() == NodeGpus(0)


@pytest.mark.parametrize(
    ("flags", "computed"), [("avx2 amx_bf16 fma", True), ("fp bf16 i8mm", True), ("avx2 avx512f fma", False)]
)
def test_bfloat16_is_for_cores_that_compute_it(
    flags: str, computed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert computes_bfloat16(cpuinfo) is computed
    assert not computes_bfloat16(tmp_path / "none")
    monkeypatch.setattr("unskew.runtime.placement.computes_bfloat16", lambda: computed)
    half = RunOptions(pp=2, dp=1, device="real", dtype="bfloat16")
    if computed:
        assert place(half, 0).kind == "cores"
    else:
        with pytest.raises(OptionsError, match="--dtype bfloat16 needs cores that compute it"):
            place(half, 0)
    assert place(msgspec.structs.replace(half, device="sleep"), 0).kind == "sleep"
    assert place(msgspec.structs.replace(half, device="gpu"), 2, [H100, H100]).kind == "gpus"
