"""Trainings under frameworks that are not ours, unchanged: what is recorded, who is named, the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.jobs import framework_job
from support.jobs.framework_job import CHUNKS, MICRO_BATCHES, STEPS, UNTOUCHED_STEPS

from unskew.collector.events import Event, IterationJudged, MicroBatchPacked, PlanApplied, Span, Verdict
from unskew.collector.paths import Store
from unskew.runtime.attach.outside.watcher import JobWatcher

NEEDS = {"hf": "transformers", "lightning": "lightning", "torchtitan": "torchtitan"}
FRAMEWORKS = ("fsdp2", "hf", "lightning")
pytestmark = [pytest.mark.alone, pytest.mark.limit(240)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, one after the other, in ranks forked from one process."""
    folder = tmp_path_factory.mktemp("jobs")
    command = [sys.executable, framework_job.__file__, str(folder / "store"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "unskew" not in done.stderr, done.stderr
    return folder


@cache
def watched(jobs: Path, case: str) -> list[Event]:
    """The log of a case, and what the watcher decides on it."""
    found: list[Event] = []
    watcher = JobWatcher(Store(jobs / "store"), case, ["a test"], lambda entry: found.append(entry.event))
    watcher.finish(0)
    watcher.close()
    return found


@pytest.fixture
def events(jobs: Path, request: pytest.FixtureRequest) -> list[Event]:
    case = str(request.param)
    if case in NEEDS and find_spec(NEEDS[case]) is None:
        pytest.skip(f"{NEEDS[case]} is not installed: docs/guide/frameworks.md says how to have it")
    return watched(jobs, case)


@pytest.mark.parametrize(
    ("events", "case"), [(case, case) for case in ("plain", *FRAMEWORKS, "torchtitan")], indirect=["events"]
)
def test_each_step_has_its_micro_batches_and_the_same_losses(events: list[Event], jobs: Path, case: str) -> None:
    """Also where activations are computed again, a scaler skips the optimizer, a part is compiled."""
    spans = Counter((one.iteration, one.rank, one.kind) for one in events if isinstance(one, Span))
    for step in range(UNTOUCHED_STEPS if case == "plain" else STEPS):
        for rank in range(2):
            counts = [spans[step, rank, kind] for kind in ("F", "B", "optimizer")]
            assert counts == [MICRO_BATCHES, MICRO_BATCHES, 1], (step, rank)
            assert spans[step, rank, "other"], (step, rank)
    measured, untouched = (_losses(jobs / f"{case}{tail}") for tail in ("", "-untouched"))
    assert len(untouched) >= UNTOUCHED_STEPS
    assert measured[: len(untouched)] == untouched


@pytest.mark.parametrize("events", FRAMEWORKS, indirect=True)
def test_the_lengths_are_those_that_the_model_is_given(events: list[Event]) -> None:
    packed = [one.lengths for one in events if isinstance(one, MicroBatchPacked) and one.iteration]
    assert {(len(lengths), len({*lengths})) for lengths in packed} == {(4, 1)}
    assert len({*packed}) > 30


@pytest.mark.parametrize("events", FRAMEWORKS, indirect=True)
def test_the_rank_whose_backward_pass_is_slow_is_named(events: list[Event]) -> None:
    first, *_ = verdicts = [one for one in events if isinstance(one, Verdict) and one.culprits]
    assert {(one.cause, one.culprits[0].rank) for one in verdicts} == {("slow_device", 1)}
    assert min(first.speed, key=first.speed.__getitem__) == "B"


@pytest.mark.parametrize("events", ["torchtitan"], indirect=True)
def test_torchtitan_s_own_log_shows_who_waits_for_data(events: list[Event]) -> None:
    verdicts = [one for one in events if isinstance(one, Verdict)]
    assert {(one.cause, one.culprits[0].rank) for one in verdicts} == {("input_bound", 1)}
    waits = Counter((one.iteration, one.rank) for one in events if isinstance(one, Span) and one.kind == "data_wait")
    assert {waits[step, rank] for step in range(1, STEPS) for rank in range(2)} == {MICRO_BATCHES}


def test_what_interrupts_the_loop_is_named_apart(jobs: Path) -> None:
    spans = [one for one in watched(jobs, "plain") if isinstance(one, Span)]
    for rank in range(2):
        kinds = Counter(one.kind for one in spans if one.rank == rank)
        assert min(kinds[kind] for kind in ("gc", "checkpoint", "evaluation")) >= 1
        assert kinds["data_wait"] == MICRO_BATCHES * UNTOUCHED_STEPS - 1, "an evaluation's batches are not the training's"


def test_each_chunk_of_a_pipeline_is_its_stage_s(jobs: Path) -> None:
    """Two stages, two replicas of each, in groups of a `DeviceMesh`."""
    events = watched(jobs, "pipeline")
    spans = Counter((one.iteration, one.rank, one.kind, one.first_layer) for one in events if isinstance(one, Span))
    for step in range(STEPS):
        assert [spans[step, rank, kind, rank // 2] for rank in range(4) for kind in ("F", "B")] == [CHUNKS] * 8
    packed = [one for one in events if isinstance(one, MicroBatchPacked)]
    assert sorted(one.micro_batch for one in packed if one.iteration == 1) == list(range(2 * CHUNKS))
    (applied,) = [one for one in events if isinstance(one, PlanApplied)]
    assert [(role["rank"], role["replica"], role["stage"]) for role in applied.plan["roles"]] == [
        (0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)
    ]  # fmt: skip
    assert all(one.log_complete for one in events if isinstance(one, IterationJudged))


@pytest.mark.parametrize(("case", "kind"), [("pipeline", "B"), ("sharded", "F")])
def test_a_slow_rank_of_a_mesh_is_named_and_who_waits_for_it_is_not(jobs: Path, case: str, kind: str) -> None:
    """Neither the other replica of its stage, which waits for its gradients, nor the other stage or shard."""
    verdicts = [one for one in watched(jobs, case) if isinstance(one, Verdict) and one.culprits]
    assert {(one.cause, one.culprits[0].rank) for one in verdicts} == {("slow_device", 3)}
    assert min(verdicts[0].speed, key=verdicts[0].speed.__getitem__) == kind


def _losses(file: Path) -> list[float]:
    line = next(line for line in file.read_text().splitlines() if line.startswith("losses "))
    return list(json.loads(line.removeprefix("losses ")))
