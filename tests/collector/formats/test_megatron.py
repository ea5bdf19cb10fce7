"""Megatron's training log: iterations of the job, and what the timers of its ranks show of who is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import ROOT

from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.collector.events import IterationTimed, Span
from unskew.collector.formats.importers import megatron
from unskew.collector.formats.registry import FormatError, bring_in
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run

MEGATRON = """\
[before the first step] training ...
 [2026-04-27 00:00:01] iteration       10/     500 | consumed samples:   160 | elapsed time per iteration (ms): 4000.5 | \
throughput per GPU (TFLOP/s/GPU): 40.4 | global batch size:    16 | lm loss: 3.000000E+00 | grad norm: 1.0 |
(min, max) time across ranks (ms):
 iteration       20/     500 | elapsed time per iteration (s): 2.5 | global batch size:    16 | lm loss: 2.5E+00 |
 iteration       20/     500 | elapsed time per iteration (ms): 2600.0/2600.0 | global batch size:    16 | lm loss: nan |
"""


def test_a_megatron_log_gives_times_loss_and_batch(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(MEGATRON)
    (run,) = megatron.read(tmp_path / "log.txt")
    first, _, second = run.events
    assert first == IterationTimed(iteration=10, wall_us=4_000_500, loss=3.0, sequences=16)
    assert isinstance(second, IterationTimed)
    assert (second.iteration, second.wall_us, second.attempt) == (20, 2_600_000, 1)
    assert second.loss != second.loss  # the restarted job's telling holds, diverged as it is
    assert run.facts["mean_over_iterations"] == 10
    assert run.facts["told_again"] == 1


TIMED = ROOT / "tests" / "support" / "traces" / "megatron_timers.log"
"""Printed by the timers of megatron-core 0.16.1 on two Gloo ranks, in a loop that sleeps, `torch.cuda.synchronize` and
`current_device` replaced as its timers need CUDA; from iteration 16 on the backward pass of rank 1 takes twice as long."""


def test_what_megatron_s_timers_log_of_ranks_names_the_slow_one(tmp_path: Path) -> None:
    store = Store.locate(tmp_path / "store")
    (run,) = bring_in(store, "megatron", TIMED, "mine")
    assert (run.ranks, run.iterations, run.notes) == (2, 30, ())
    with open_store(store) as reader:
        verdicts = diagnose(load_run(reader, "mine")).verdicts
        forward = reader.sql("select wall_us from spans where iteration = 1 and kind in ('F', 'data_wait') order by rank, kind")
    (verdict,) = verdicts
    assert ([party.rank for party in verdict.culprits], [*verdict.speed], verdict.since_iteration) == ([1], ["B"], 16)
    assert forward["wall_us"].to_list() == [12_320, 790] * 2, "the batch is fetched within the forward pass"


@pytest.mark.parametrize(
    ("argument", "kinds", "notes"),
    [
        ("pipeline_model_parallel_size ......... 2", {("F", 0), ("F", 1), ("B", 0), ("B", 1)}, []),
        ("overlap_grad_reduce ................. True", {("F", 0)}, ["backward-compute of the ranks is left out: gradients"]),
        ("tensor_model_parallel_size .......... 2", set(), [f"{pass_}-compute of the ranks is left out: ranks of one tensor"
                                                            for pass_ in ("forward", "backward")]),
        ("world_size .......................... 1", set(), [f"{pass_}-compute of the ranks is left out: the log has no"
                                                            for pass_ in ("forward", "backward")]),
    ],
)  # fmt: skip
def test_a_megatron_timer_that_holds_a_wait_is_left_out(
    tmp_path: Path, argument: str, kinds: set[tuple[str, int]], notes: list[str]
) -> None:
    (tmp_path / "log.txt").write_text(TIMED.read_text().replace("--- end of arguments", f"\n  {argument}\n--- end"))
    (run,) = megatron.read(tmp_path / "log.txt")
    spans = [one for one in run.events if isinstance(one, Span)]
    assert {(one.kind, one.first_layer) for one in spans if one.kind in {"F", "B"}} == kinds
    assert {one.kind for one in spans} >= {"data_wait", "all_reduce", "optimizer"}
    assert all(note.startswith(begin) for note, begin in zip(run.notes, notes, strict=True))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\n iteration 1/ 5 | elapsed time per iteration (ms): quick | lm loss: 1 |", "line 2: the elapsed time is 'quick'"),
        (" iteration 1/ 5 | lm loss: 1 |", "line 1: an iteration without 'elapsed time"),
        ("nothing here", "no line of this file"),
    ],
)
def test_a_bad_megatron_line_is_told_by_its_number(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "log.txt").write_text(text)
    with pytest.raises(FormatError, match=sentence):
        megatron.read(tmp_path / "log.txt")
