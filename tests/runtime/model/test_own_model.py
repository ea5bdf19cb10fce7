"""A model and data of somebody's own: costs measured, plans by them, losses those of plain torch, data always in one order."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.jobs import own_models
from support.training.runtime_runs import SMALL, Run, train
from torch.nn import functional

from unskew.collector.events import DeviceLost, IterationJudged, PlanApplied, RunFinished
from unskew.runtime.control.launch import prepared
from unskew.runtime.data import InOrder, load_data
from unskew.runtime.options import OptionsError, RunOptions

pytestmark = pytest.mark.limit(120)
HERE = own_models.__file__


def own(function: str = "model", **more: object) -> RunOptions:
    return msgspec.structs.replace(SMALL, model=f"{HERE}:{function}", data=f"{HERE}:documents", **more)


def plain_losses(options: RunOptions, iterations: int) -> list[float]:
    """One process, plain torch: the same layers, the same batches, AdamW."""
    torch.manual_seed(options.seed)
    layers = getattr(own_models, str(options.model).rpartition(":")[2])()
    layers = [layer.to(getattr(torch, options.dtype)) for layer in layers]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    data, losses = load_data(options), []
    for iteration in range(iterations):
        assert isinstance(data, InOrder)
        batch = [[data.document(number) for number in micro_batch] for micro_batch in data.drawn(iteration)]
        tokens, loss = sum(len(one) - 1 for micro_batch in batch for one in micro_batch), torch.zeros(())
        for micro_batch in batch:
            lengths = [len(one) - 1 for one in micro_batch]
            x, targets = (
                torch.from_numpy(np.concatenate([one[part] for one in micro_batch])) for part in (slice(-1), slice(1, None))
            )
            for layer in layers:
                x = layer(x, lengths) if layer.forward.__code__.co_argcount > 2 else layer(x)
            loss = loss + functional.cross_entropy(x, targets, reduction="sum") / tokens
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def test_layers_that_differ_are_measured_and_divided_by_what_they_cost() -> None:
    options = prepared(own())
    assert len(options.layer_weights) == options.layers == 6
    assert options.layer_weights[3] > 3 * sorted(options.layer_weights)[-2]
    plan = options.first_plan()
    busiest = max(plan.work_of(role.first_layer, role.n_layers) for role in plan.roles)
    assert busiest == pytest.approx(min(max(plan.work_of(0, cut), plan.work_of(cut, 6 - cut)) for cut in range(1, 6)))
    assert options.given_on == ((16,),) * 5 + ((own_models.VOCABULARY,),)
    assert prepared(options) == options  # a resumed run keeps what was measured


def test_data_is_a_function_of_the_position_whatever_was_read_before() -> None:
    for function in ("documents", "batch_of", "few"):
        options = msgspec.structs.replace(own(), data=f"{HERE}:{function}")

        def of(numbers: list[int], options: RunOptions = options) -> dict[int, list[list[list[int]]]]:
            data = load_data(options)
            return {
                number: [[data.document(one).tolist() for one in micro_batch] for micro_batch in data.drawn(number)]  # type: ignore[union-attr]
                for number in numbers
            }

        expected = of([*range(12)])
        for numbers in ([11], [7, 3, 8], [2, 11, 2]):
            assert of(numbers) == {number: expected[number] for number in numbers}
        for batch in expected.values():
            assert len(batch) == options.micro_batches
            assert max(sum(len(one) - 1 for one in micro_batch) for micro_batch in batch) <= options.tokens


@pytest.mark.slow
def test_losses_are_those_of_plain_torch_also_with_a_death_and_a_split_backward(tmp_path: Path) -> None:
    run = train(tmp_path, "kill:rank=3,at=10", base=prepared(own(schedule="zb-h1", iterations=12)))
    assert run.of(RunFinished)[-1].status == "done"
    assert [lost.rank for lost in run.of(DeviceLost)] == [3]
    assert run.losses == pytest.approx(plain_losses(run.options, 12), rel=1e-8)
    judged = [one for one in run.of(IterationJudged) if one.predicted_us is not None and one.iteration < 10]
    assert [one.measured_us for one in judged] == [pytest.approx(one.predicted_us, rel=0.01) for one in judged] != []
    assert all("layer_weights" in event.plan for event in run.of(PlanApplied))


@pytest.mark.slow
def test_a_gpt2_of_transformers_trains_as_plain_torch_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `frameworks` is not installed: no GPT-2 of transformers")
    run: Run = train(tmp_path, base=prepared(own("gpt2", iterations=6, dtype="float32")))
    assert run.losses == pytest.approx(plain_losses(run.options, 6), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        ("nowhere:model", None, "nowhere of nowhere:model cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:tied", None, "layers 0 and 1 share a parameter, allowed: each has its own"),
        (f"{HERE}:nothing", None, "has no function nothing"),
        ("model", None, "model names no function, allowed: module:function or path/file.py:function"),
        (f"{HERE}:model", f"{HERE}:model", "failed: "),
        (None, f"{HERE}:batch_of", None),
        (f"{HERE}:few", None, "gives list, allowed: a list of nn.Modules"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_said_in_a_sentence(model: str | None, data: str | None, sentence: str | None) -> None:
    options = msgspec.structs.replace(SMALL, model=model, data=data)
    if sentence is None:
        assert prepared(options) == options
        return
    with pytest.raises(OptionsError, match=sentence.replace("(", r"\(")):
        prepared(options)
