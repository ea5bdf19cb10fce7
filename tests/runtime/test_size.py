"""What the controller reckons of our own model without torch is what the model has."""

from __future__ import annotations

import pytest

from unskew.runtime.model.model import Layer
from unskew.runtime.size import VOCABULARY, ModelSize

APART = ModelSize(n_layers=4, dim=48, heads=5, ends_apart=True)


@pytest.mark.parametrize("size", [ModelSize(n_layers=3, dim=48, heads=5), ModelSize(n_layers=1, dim=16, heads=1), APART])
def test_each_layer_has_the_parameters_that_are_reckoned(size: ModelSize) -> None:
    for layer in range(size.n_layers):
        assert size.parameters(layer) == sum(one.numel() for one in Layer(size, layer).parameters())


def test_ends_that_are_layers_of_their_own_have_what_the_outer_layers_have_otherwise() -> None:
    joined = ModelSize(n_layers=2, dim=48, heads=5)
    assert sum(map(APART.parameters, range(4))) == sum(map(joined.parameters, range(2)))
    assert APART.parameters(0) == VOCABULARY * 48
    embedding, *blocks, head = APART.layer_weights
    assert sum(APART.layer_weights) == pytest.approx(4, abs=0.003)
    assert embedding < 0.02 < head < blocks[0] == blocks[1]
    assert head / blocks[0] == pytest.approx(VOCABULARY * 48 / (APART.parameters(1) - 2 * 48), abs=0.001)
    assert joined.layer_weights == ()
