"""Products in bfloat16, everything else in float32: near to the losses of float32, and what is kept is not rounded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, train
from torch.distributed.checkpoint import FileSystemReader

from unskew.collector.events import IterationJudged
from unskew.collector.files.checkpoints import checkpoints
from unskew.runtime.control.allowed import check
from unskew.runtime.model.model import product, weight_gradients
from unskew.runtime.options import OptionsError, RunOptions

ROUNDED = msgspec.structs.replace(SMALL, dtype="bfloat16", dim=32, heads=4, iterations=16, mode="observe")


@pytest.fixture(scope="module")
def exact() -> list[float]:
    return undisturbed_losses(msgspec.structs.replace(ROUNDED, dtype="float32"))


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1"}, {"tp": 2, "pp": 1}])
def test_losses_are_near_to_those_of_float32(options: dict[str, object], tmp_path: Path, exact: list[float]) -> None:
    """Also with a death in the middle; and they are others, so something was rounded. Iterations are predicted as ever."""
    base = msgspec.structs.replace(ROUNDED, **options)  # type: ignore[arg-type]
    run = train(tmp_path, "kill:rank=1,at=9", base=base, mode="auto", checkpoint_every=8)
    assert run.losses == pytest.approx(exact, rel=2e-3)
    assert run.losses != pytest.approx(exact, rel=1e-6)
    assert run.losses[-1] < 0.98 * run.losses[0]
    whole = [one for one in run.of(IterationJudged) if one.iteration != 9]  # that was begun twice, and may be all logged
    judged = [one for one in whole if one.predicted_us is not None]
    assert judged
    assert all(one.predicted_us == pytest.approx(one.measured_us, rel=0.01) for one in judged)
    (saved, *_) = checkpoints(run.store, run.id)
    parts = [FileSystemReader(part).read_metadata() for part in saved.folder.iterdir() if part.is_dir()]
    formats = {of.properties.dtype for part in parts for of in part.state_dict_metadata.values() if hasattr(of, "properties")}
    assert formats == {torch.float32}


def test_a_product_is_rounded_and_the_gradient_of_its_weight_is_kept_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=draw) for shape in ((5, 7), (3, 7), (5, 3)))
    found = []
    for deferred in (None, []):
        given, trained = x.clone().requires_grad_(True), torch.nn.Parameter(weight.clone())
        with torch.autocast("cpu", torch.bfloat16):
            y = product(given, trained, deferred)
        assert y.dtype == torch.bfloat16
        y.backward(dy.to(y.dtype))
        weight_gradients(deferred or [])
        assert given.grad is not None
        assert trained.grad is not None
        assert (given.grad.dtype, trained.grad.dtype) == (torch.float32, torch.float32)
        torch.testing.assert_close(trained.grad, dy.T @ x, rtol=0.02, atol=0.02)
        torch.testing.assert_close(given.grad, dy @ weight, rtol=0.02, atol=0.02)
        found.append((given.grad, trained.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_losses_that_are_compared_are_not_rounded() -> None:
    with pytest.raises(OptionsError, match="--dtype bfloat16 rounds too much for --verify"):
        check(RunOptions(device="virtual", dtype="bfloat16", verify=True))
