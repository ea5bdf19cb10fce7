"""Each kind of fault happens to real processes, is in the log as the truth, and leaves the losses what they are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import LONG_CHUNKS, SMALL, light, train

from unskew.collector.events import (
    DeviceLost,
    FaultInjected,
    IterationJudged,
    PredictorFitted,
    RankAdded,
    RunFinished,
    Verdict,
    VerdictScored,
)

pytestmark = [pytest.mark.slow, pytest.mark.limit(120)]


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return undisturbed_losses(msgspec.structs.replace(SMALL, iterations=30))


def test_a_process_ends_by_an_error_and_by_a_signal_its_disk_fills_and_it_comes_back(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    faults = ("segfault:rank=1,at=3,phase=B", "rejoin:rank=1,at=5", "full_disk:rank=0,at=6,until=8", "exception:rank=2,at=12")
    run = train(tmp_path, *faults, iterations=30)
    assert run.of(RunFinished)[-1].status == "done"
    assert run.losses == pytest.approx(undisturbed, rel=0, abs=1e-8)
    assert [(lost.rank, lost.detail) for lost in run.of(DeviceLost)] == [
        (1, "signal SIGSEGV"), (2, "InjectedError: injected in iteration 12"),
    ]  # fmt: skip
    assert [(added.rank, added.by) for added in run.of(RankAdded)] == [(1, "fault")]
    assert {(fault.kind, fault.rank, fault.at_iteration) for fault in run.of(FaultInjected)} == {
        ("segfault", 1, 3), ("rejoin", 1, 5), ("full_disk", 0, 6), ("exception", 2, 12),
    }  # fmt: skip


def test_a_slow_link_is_named_and_priced_beside_links_that_cost(tmp_path: Path) -> None:
    """Each link is on its way for 1 ms, at 30 Mbit/s; the predictor learns both, and then what the slow one takes longer."""
    fault = "slow_link:rank=2,peer=3,delay_ms=20,at=22"
    run = train(tmp_path, fault, base=light(LONG_CHUNKS), iterations=34, link_us=1_000, link_mbps=30)
    (verdict,) = run.of(Verdict)
    assert (verdict.cause, verdict.culprits[0].link) == ("slow_link", (2, 3))
    assert verdict.at_iteration <= 28
    assert verdict.evidence["more_us"] == pytest.approx(20_000, rel=0.05)
    (fitted,) = run.of(PredictorFitted)
    per_token = 8 * 8 * run.options.dim / 30  # float64
    assert (fitted.model["message_us"], fitted.model["message_token_us"]) == pytest.approx((1_000, per_token), rel=0.01)
    judged = [one for one in run.of(IterationJudged) if one.iteration > verdict.at_iteration]
    assert all(one.predicted_us == pytest.approx(one.measured_us, rel=0.01) for one in judged)
    (scored,) = run.of(VerdictScored)
    assert (scored.correct, scored.truth) == (True, "slow_link rank 2 to 3 at iteration 22")
