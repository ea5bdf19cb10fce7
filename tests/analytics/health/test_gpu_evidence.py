"""What GPUs said of themselves stands in the verdict: recorded events, as the loop (replayed) and `diagnose` see them."""

from __future__ import annotations

import pytest
from support.training.runtime_runs import Run, train

from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.health.gpu_evidence import remembered, with_gpu
from unskew.analytics.replay.causes import causes_of
from unskew.analytics.replay.rehearsal import ControllerRehearsal
from unskew.collector.events import GpuState, Party, Verdict
from unskew.collector.read.reader import open_store
from unskew.collector.write.spool import SpoolWriter
from unskew.edge.load_run import load_run
from unskew.edge.recorded_run import recorded_run

COOL = {"highest_clock_mhz": 1980, "temperature_c": 55, "uncorrected_errors": 2}
HOT = GpuState(
    rank=1, iteration=16, clock_mhz=900, highest_clock_mhz=1980, held_down_by=("power cap", "temperature, by hardware"),
    temperature_c=91, uncorrected_errors=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rank 1 turns slow in iteration 16; and its GPU says why, rank 0's that nothing holds it down."""
    run = train(
        tmp_path_factory.mktemp("gpu"), "slow:rank=1,factor=1.8,at=16", device="virtual", pp=2, dp=2, micro_batches=4,
        iterations=30, mode="observe",
    )  # fmt: skip
    writer = SpoolWriter(run.store, run.id, "gpus")
    for rank in (0, 1):
        writer.append(GpuState(rank=rank, iteration=0, clock_mhz=1900, held_down_by=("power cap",), **COOL))
    writer.append(GpuState(rank=0, iteration=16, clock_mhz=1900, held_down_by=("power cap",), **COOL))
    writer.append(HOT)
    writer.close()
    return run


def verdict_of(run: Run, *, offline: bool) -> Verdict:
    with open_store(run.store) as reader:
        if offline:
            return next(one for one in diagnose(load_run(reader, run.id)).verdicts if one.cause == "slow_device")
        rehearsal = ControllerRehearsal(*causes_of(recorded_run(reader, run.id)))
    rehearsal.run()
    return [event for event in rehearsal.made if isinstance(event, Verdict)][-1]


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("offline", [False, True], ids=["replayed", "diagnosed"])
def test_the_verdict_says_what_the_gpu_said_since_it_was_slow(history: Run, offline: bool) -> None:
    verdict = verdict_of(history, offline=offline)
    assert verdict.culprits[0].rank == 1
    assert verdict.since_iteration == 16
    assert "its clock is held down at 900 of 1980 MHz by: temperature, by hardware, 91 C" in verdict.sentence
    assert verdict.sentence.endswith("3 uncorrected memory errors since the run began")
    gpu = verdict.evidence["gpu"]
    assert (gpu["at_iteration"], gpu["clock_mhz"], gpu["clock_mhz_when_the_run_began"]) == (16, 900, 1900)
    assert gpu["held_down_by_since_the_run_began"] == ["temperature, by hardware"]
    live = history.of(Verdict)[0]  # there was no GPU
    assert "gpu" not in live.evidence


def slow(since: int) -> Verdict:
    return Verdict(
        verdict=1, cause="slow_device", culprits=(Party(kind="device", rank=1),), since_iteration=since, at_iteration=since + 4,
        confidence=1.0, sentence="rank 1 is slow", evidence={},
    )  # fmt: skip


def test_what_was_said_before_is_no_evidence_and_a_cool_gpu_gets_no_sentence() -> None:
    known = remembered({}, [GpuState(rank=1, iteration=0, clock_mhz=1900, **COOL), HOT])
    assert with_gpu(slow(17), known) == slow(17)
    assert "gpu" in with_gpu(slow(16), known).evidence
    calm = remembered({}, [GpuState(rank=1, iteration=at, clock_mhz=1900, **COOL) for at in (0, 30)])
    assert with_gpu(slow(25), calm).sentence == "rank 1 is slow"
    assert with_gpu(slow(25), calm).evidence["gpu"]["new_uncorrected_errors"] == 0
    silent = remembered({}, [GpuState(rank=1, iteration=30)])
    assert with_gpu(slow(25), silent).evidence["gpu"]["clock_mhz"] is None
