"""Tensor parallelism on real ranks: the losses are those of ranks that hold whole layers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.replica_reference import expected_losses
from support.runtime_runs import SMALL, assert_exact, train

from unskew.runtime.options import RunOptions

pytestmark = pytest.mark.limit(60)
TP = msgspec.structs.replace(SMALL, tp=2, dp=1, heads=2, layers=2, micro_batches=2, iterations=4)


def undisturbed(options: RunOptions) -> list[float]:
    """The losses of a model that knows no ranks."""
    every = dict.fromkeys(range(options.dp))
    return expected_losses(
        msgspec.structs.replace(options, tp=1), [dict.fromkeys(every, number) for number in range(options.iterations)]
    )


def test_groups_train_as_single_ranks_do(tmp_path: Path) -> None:
    run = train(tmp_path, base=TP)
    assert_exact(run, undisturbed(TP), {0, 1, 2, 3})
    chunks = run.sql("select rank, \"group\", wait_tp_us from spans where run = $run and kind in ('F', 'B')")
    assert {(one["rank"], one["group"]) for one in chunks} == {(0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")}
    assert {one["wait_tp_us"] for one in chunks} == {0}
    sent = run.sql("select rank, peer, bytes from spans where run = $run and kind = 'send'")
    assert {(one["rank"], one["peer"]) for one in sent} == {(0, 2), (1, 3), (2, 0), (3, 1)}, "each byte crosses once"
