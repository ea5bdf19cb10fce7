"""What the controller reckons of our own model without torch is what the model has."""

from __future__ import annotations

import pytest

from unskew.runtime.model.model import Layer
from unskew.runtime.model.size import ModelSize


@pytest.mark.parametrize("size", [ModelSize(n_layers=3, dim=48, heads=5), ModelSize(n_layers=1, dim=16, heads=1)])
def test_each_layer_has_the_parameters_that_are_reckoned(size: ModelSize) -> None:
    for layer in range(size.n_layers):
        assert size.parameters(layer) == sum(one.numel() for one in Layer(size, layer).parameters())
