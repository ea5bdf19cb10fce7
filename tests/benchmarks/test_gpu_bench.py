"""The benches on a GPU, without one: what is computed of what was measured there."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
from rich.progress import Progress
from support.training.runtime_runs import SMALL

from unskew.benchmarks.gpu import runtime
from unskew.benchmarks.gpu.at_hand import apart, no_gpu, within
from unskew.benchmarks.gpu.chunks import LengthTimes
from unskew.benchmarks.runs import Bench, FinishedRun
from unskew.collector.events import Event, Span
from unskew.collector.paths import Store

BENCH = Bench(Progress(), Store(Path("never-used")))


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU at hand")
def test_without_a_gpu_one_sentence_says_so() -> None:
    (one,) = runtime.figures(BENCH)
    assert one.value is None
    assert one.note in ("not measured: this torch is built without CUDA", "not measured: there is no GPU at hand")


def timed(lengths: tuple[int, ...], launches_us: float = 0.0) -> LengthTimes:
    """On a device of the predictor's own form; `launches_us`: it is never quicker, for it is launched from a host."""
    us = 40.0 + 0.5 * sum(lengths) + 1e-4 * sum(length**2 for length in lengths)
    return LengthTimes(lengths=lengths, forward_us=(round(max(us, launches_us)),) * 3, backward_us=(round(2 * us),) * 3)


def test_the_error_on_lengths_that_were_held_out_is_that_of_each_kind() -> None:
    learned = [timed(lengths) for lengths in runtime.LEARNED]
    exact = list(runtime.errors_on(learned, [timed(lengths) for lengths in runtime.HELD_OUT]))
    assert [one.value for one in exact] == pytest.approx([0.0, 0.0], abs=0.5)
    held_out = [timed(lengths, launches_us=1_000.0) for lengths in runtime.HELD_OUT]
    forward, backward = runtime.errors_on(learned, held_out)
    assert forward.value is not None
    assert forward.value > 5
    assert backward.value == pytest.approx(0.0, abs=0.5)
    assert "256: -8" in forward.note


def span(start_us: int, wall_us: int, rank: int = 0, iteration: int = 3) -> Event:
    return Span(
        kind="F", device="gpu-0", rank=rank, plan_version=0, attempt=0, iteration=iteration, start_us=start_us, wall_us=wall_us
    )


def test_chunks_that_overlap_on_one_rank_are_counted() -> None:
    spans = [span(100, 50), span(150, 200), span(320, 10), span(320, 10, rank=1), span(310, 10, iteration=4)]
    run = FinishedRun(
        options=SMALL, summary=None, events=spans, same_process=frozenset(), not_once=0, lost=0, doubled=0,  # type: ignore[arg-type]
    )  # fmt: skip
    assert runtime._overlapping(run) == 1


@pytest.mark.slow
def test_what_breaks_in_a_process_of_its_own_is_reported() -> None:
    assert apart(time.monotonic_ns, 60) < time.monotonic_ns()
    with pytest.raises(RuntimeError, match="ValueError: sleep length must be non-negative"):
        apart(partial(time.sleep, -1.0), 60)
    with pytest.raises(RuntimeError, match="its process ended with code 7"):
        apart(partial(os._exit, 7), 60)
    with pytest.raises(TimeoutError, match=r"not done within 0\.1 s"):
        apart(partial(time.sleep, 30.0), 0.1)


def test_what_takes_too_long_is_broken_off() -> None:
    with pytest.raises(TimeoutError, match="not done within 1 s"), within(1):
        time.sleep(20)
