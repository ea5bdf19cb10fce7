"""What acts on a training that is not ours changes who computes what, never what is computed: float64 against one process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import acting_job
from support.jobs.acting_job import CASES, EACH, SAMPLES, Case
from support.training.warm_processes import warm_process
from torch import nn

from unskew.runtime.attach.weights import loss_of

EXACT = 1e-12
DIVIDED = [name for name, case in CASES.items() if case.samples and name not in ("unknown", "resumed")]
pytestmark = [pytest.mark.slow, pytest.mark.limit(200)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, one after the other, in ranks forked from one process."""
    folder = tmp_path_factory.mktemp("jobs")
    code, printed = warm_process().run_script(acting_job.__file__, str(folder / "store"), str(folder), *CASES)
    assert code == 0, printed
    return folder


def of(jobs: Path, case: Case) -> list[dict[str, Any]]:
    """What each rank was given, its losses, and the parameters it ended with."""
    return [json.loads((jobs / f"{case.name}-{rank}.json").read_text()) for rank in range(case.ranks)]


@pytest.mark.parametrize("name", DIVIDED)
def test_a_divided_batch_gives_the_update_of_one_process(jobs: Path, name: str) -> None:
    case = CASES[name]
    ranks = of(jobs, case)
    counts = [[len(batch) for batch in one["given"]] for one in ranks]
    stay = [rank for rank, count in enumerate(case.samples) if count]
    acted = [count[-1] for count in counts if len(count) == len(counts[stay[0]])]
    assert acted == [case.samples[rank] for rank in stay]
    assert all(
        sum(column) == EACH * case.ranks for column in zip(*(counts[rank] for rank in stay), strict=True) if case.ranks == 2
    )
    expected = acting_job.reference(case, [one["given"] for one in ranks])
    for rank in stay:
        apart = max(abs(a - b) for a, b in zip(ranks[rank]["parameters"], expected, strict=True))
        assert apart <= EXACT


def test_where_nothing_acts_all_is_the_same_bit_for_bit(jobs: Path) -> None:
    untouched, nothing, unknown = (of(jobs, CASES[name]) for name in ("untouched", "nothing", "unknown"))
    assert nothing == untouched
    # A plan that the loop's loss does not allow is not entered.
    assert [one["given"] for one in unknown] == [one["given"] for one in untouched]


def test_balanced_samples_count_once_each_and_the_ranks_alike(jobs: Path) -> None:
    first, second = of(jobs, CASES["balanced"])
    batches = SAMPLES // (2 * EACH)
    for epoch in range(2):
        mine = [one["given"][epoch * batches : (epoch + 1) * batches] for one in (first, second)]
        assert Counter(index for of_rank in mine for batch in of_rank for index in batch) == Counter(range(SAMPLES))
    lengths = acting_job.Rows().lengths
    loads = [[sum(lengths[index] for index in batch) for batch in one["given"][batches:]] for one in (first, second)]
    untouched = of(jobs, CASES["untouched"])
    before = [[sum(lengths[index] for index in batch) for batch in one["given"][batches:]] for one in untouched]

    def longest(of_ranks: list[list[int]]) -> int:
        return sum(map(max, zip(*of_ranks, strict=True)))

    assert longest(loads) < 0.95 * longest(before)
    assert longest(loads) <= 1.02 * sum(map(sum, loads)) / 2


def test_a_loop_that_resumes_goes_on_with_the_same_batches(jobs: Path) -> None:
    for resumed, whole in zip(of(jobs, CASES["resumed"]), of(jobs, CASES["balanced"]), strict=True):
        assert resumed["given"] == whole["given"]


def test_how_a_loss_is_divided_shows_its_graph() -> None:
    found = torch.zeros(6, 5, requires_grad=True)
    targets = torch.tensor([0, 1, 2, -100, -100, 3])
    cross_entropy = nn.functional.cross_entropy
    total = cross_entropy(found, targets, reduction="sum")
    assert loss_of(cross_entropy(found, targets)) == "mean"
    assert loss_of(cross_entropy(found, targets) / 4) == "mean"
    assert loss_of(found.square().mean() * 0.5) == "mean"
    assert loss_of(total / 4) == "mean"
    assert loss_of(total / torch.tensor(8.0) * 2) == "global"
    assert loss_of(total / 9) == "global"
    assert loss_of(total) == "unknown"
    assert loss_of((found.sum(dim=1) * torch.ones(6)).sum() / 6) == "unknown"
    assert loss_of(cross_entropy(found, targets) + total / 9) == "unknown"
