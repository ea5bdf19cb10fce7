"""A model and data of somebody's own: costs measured, plans by them, losses those of plain torch, data always in one order."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.jobs import odd_models, own_models
from support.training.runtime_runs import SMALL, Run, train
from support.training.threads_comm import Hub, ThreadComm, in_threads
from torch import Tensor
from torch.nn import functional

from unskew.analytics.shards.parts import Part, Piece, ends_of, parts_by
from unskew.collector.events import DeviceLost, IterationJudged, PlanApplied, RunFinished
from unskew.collector.read.reader import open_store
from unskew.runtime.control.launch import prepared
from unskew.runtime.control.resume import resumed
from unskew.runtime.data import InOrder, load_data
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.model.own_model import own_model
from unskew.runtime.model.own_shards import LoneMember
from unskew.runtime.options import OptionsError, RunOptions
from unskew.runtime.own import function_of

pytestmark = pytest.mark.limit(120)
HERE, ODD = own_models.__file__, odd_models.__file__


def own(function: str = "model", **more: object) -> RunOptions:
    return msgspec.structs.replace(SMALL, model=f"{HERE}:{function}", data=f"{HERE}:documents", **more)


def plain_losses(options: RunOptions, iterations: int) -> list[float]:
    """One process, plain torch: the same layers, the same batches, AdamW."""
    torch.manual_seed(options.seed)
    layers = function_of(str(options.model))()
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


class Member:
    """One member's place in a group of threads."""

    sequence_parallel = False

    def __init__(self, comm: ThreadComm) -> None:
        self._comm = comm

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.gather(tensor).sum(0))

    def gather(self, tensor: Tensor) -> Tensor:
        return self._comm.all_gather(tensor)


@pytest.mark.parametrize("weights", [(1, 1), (1, 2, 1), (3, 1)])
def test_parts_of_layers_give_the_gradients_of_whole_ones(weights: tuple[int, ...]) -> None:
    """Norms of each head and layers that name nothing included."""
    model, hub, parts, there = own_model(f"{HERE}:sharded", 0), Hub(), parts_by(weights), list[int]()
    ids, targets = torch.randint(0, own_models.VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))

    def held(part: Part | None) -> list[HeldLayer]:
        cpu = torch.device("cpu")
        return [HeldLayer(model, n, seed=0, dtype=torch.float64, device=cpu, part=part) for n in range(model.n_layers)]

    def trained(layers: list[HeldLayer], shard: Member | None) -> float:
        x = ids
        for layer in layers:
            x = layer.module(x, (12, 8), None, shard)
        loss = layers[-1].module.loss(x, targets, shard)
        torch.autograd.backward(loss)
        return float(loss.detach())

    whole = held(None)
    loss = trained(whole, None)

    def live(rank: int) -> None:
        mine = held(parts[rank])
        assert trained(mine, Member(ThreadComm(hub, rank, range(len(parts))))) == pytest.approx(loss, rel=1e-12)
        for own, of in zip(mine, whole, strict=True):
            wanted = of.pack_sum(0, Piece(0, *ends_of(parts[rank])))
            assert torch.allclose(own.pack_sum(0), wanted, rtol=1e-9, atol=1e-12)
            assert float(wanted.abs().max()) > 0
        there.append(rank)

    in_threads(range(len(parts)), live)
    assert sorted(there) == [*range(len(parts))]


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.parametrize(("schedule", "tp"), [("1f1b", 2), ("zb-h1", 3)])
def test_losses_of_a_model_that_names_its_shards_are_those_of_plain_torch(tmp_path: Path, schedule: str, tp: int) -> None:
    """Groups of even and uneven parts; a member dies, and its layers are one rank's again."""
    options = prepared(own("sharded", tp=tp, dp=2 if tp == 2 else 1, schedule=schedule, iterations=10))
    run = train(tmp_path, *(["kill:rank=1,at=5"] if tp == 2 else []), base=options)
    assert run.of(RunFinished)[-1].status == "done"
    assert run.losses == pytest.approx(plain_losses(run.options, 10), rel=1e-8)
    assert (options.units, [count > 0 for count in options.kept_cut]) == (4, [False, True, False, True, True])
    assert options.layer_sums == ((1, 0), (2, 2), (0, 0), (2, 2), (0, 1))


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.parametrize(("model", "tp"), [("gpt2", 1), ("gpt2", 2), ("qwen3", 2)])
def test_models_of_transformers_train_as_plain_torch_does(tmp_path: Path, model: str, tp: int) -> None:
    pytest.importorskip("transformers", reason="the extra `frameworks` is not installed: no models of transformers")
    run: Run = train(tmp_path, base=prepared(own(model, tp=tp, iterations=6, dtype="float32")))
    assert run.of(RunFinished)[-1].status == "done"
    assert run.losses == pytest.approx(plain_losses(run.options, 6), rel=1e-5)


def test_sums_of_hidden_states_are_counted_and_none_of_a_parameters_gradient() -> None:
    """Such a gradient may have no dimension, or by chance as many numbers as there are tokens."""
    group = LoneMember(tokens=4)
    for shape in ((), (4,), (9,), (4, 16)):
        group.sum(torch.ones(shape))
    assert group.sums == 1


def test_what_cannot_be_cut_is_refused() -> None:
    for model, sentence in (
        ("model", "--tp 2 is too large for --model .*, allowed: 1, for no layer names its shards"),
        ("misnamed", r"layer 1 of --model: shards\(\) cuts of by RowCut\(units=5\), allowed: units that divide 16"),
    ):
        with pytest.raises(OptionsError, match=sentence):
            prepared(own(model, tp=2))
    with pytest.raises(OptionsError, match=r"--tp 5 is too large for --model .*, allowed: 4 or less"):
        prepared(own("sharded", tp=5))


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
        (f"{ODD}:ends", None, "ends failed: SystemExit: 3"),
        (f"{ODD}:unchained", None, "layer 2 of --model cannot take [58, 24]: RuntimeError"),
        (f"{ODD}:few_logits", None, "the loss of layer 1 of --model cannot take [58, 8] and targets [58]: IndexError"),
        (f"{ODD}:loss_of_each", None, "the loss of layer 1 of --model gives [58], allowed: the sum over the tokens"),
        (f"{ODD}:no_number", None, "the first loss of --model is nan, allowed: a finite number"),
        (f"{ODD}:constant_loss", None, "the backward pass of the loss of layer 1 of --model failed: RuntimeError"),
        (f"{ODD}:all_frozen", None, "no layer of --model has a parameter to train, allowed: one or more"),
        (f"{ODD}:never_summed", None, "half of layer 1 of --model gives [58, 8], allowed: [58, 16] as the whole layer"),
        (f"{ODD}:unnamed_shards", None, "layer 1 of --model: shards() failed: AttributeError"),
        (None, f"{ODD}:no_documents", "gives NoneType, allowed: documents or packed batches"),
        (None, f"{ODD}:numbers", "gives int as a document: numbers of type int64 in 0 dimensions, allowed: ids"),
        (None, f"{ODD}:texts", "gives str as a document: numbers of type <U9 in 0 dimensions, allowed: ids"),
        (None, f"{ODD}:fractions", "gives list as a document: numbers of type float64 in 1 dimensions, allowed: ids"),
        (None, f"{ODD}:below_zero", "has the id -1, allowed: bytes without --model, 0 to 255"),
        (None, f"{ODD}:large", "has the id 256, allowed: bytes without --model, 0 to 255"),
        (None, f"{ODD}:one_id_each", "gives 100,000 documents in a row of less than two ids, which have no token"),
        (None, f"{ODD}:breaks", "breaks failed: OSError: the disk is gone"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_said_in_a_sentence(model: str | None, data: str | None, sentence: str | None) -> None:
    data = data or (f"{HERE}:documents" if ODD in str(model) else None)
    options = msgspec.structs.replace(SMALL, model=model, data=data)
    if sentence is None:
        assert prepared(options) == options
        return
    with pytest.raises(OptionsError, match=re.escape(sentence)):
        prepared(options)


@pytest.mark.slow
def test_a_stage_of_frozen_layers_hands_on_no_gradient_and_a_detached_one_zeros(tmp_path: Path) -> None:
    """A layer that is cut off has layers below it, which wait for a gradient. A checkpoint has nothing of one that trains
    nothing."""
    frozen = prepared(msgspec.structs.replace(own(pp=4, dp=1, iterations=6), model=f"{ODD}:first_frozen", checkpoint_every=2))
    run = train(tmp_path / "frozen", base=frozen)
    assert run.losses == pytest.approx(plain_losses(frozen, 6), rel=1e-8)
    with open_store(run.store) as reader:
        again = resumed(run.store, reader, run.id, {"iterations": 8}, ("iterations",))
    assert train(tmp_path / "frozen", base=again).summary.losses == pytest.approx(plain_losses(frozen, 8), rel=1e-8)
    detached = prepared(
        msgspec.structs.replace(frozen, model=f"{ODD}:detached", layer_weights=(), shapes=(), kept=(), kept_cut=())
    )
    assert train(tmp_path / "detached", base=detached).of(RunFinished)[-1].status == "done"
