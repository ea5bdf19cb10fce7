"""What it costs to split whole backward passes by a rule: nothing where the emulated device keeps the rule, too."""

import numpy as np
import pytest

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.device_profiles import profile
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.prediction import predict_iterations

PLAN = uniform_plan(tp=1, pp=4, dp=2, n_layers=16, micro_batches=16, schedule="zb-h1")


def iteration_us(cost: CostModel) -> float:
    lengths = np.random.default_rng(3).integers(16, 128, (10, 16, 2))
    batches = [[Work(int(one.sum()), int((one**2).sum())) for one in iteration] for iteration in lengths]
    return float(predict_iterations(PLAN, batches, cost).mean())


@pytest.mark.parametrize(("name", "least", "most"), [("steady", 0.0, 1e-9), ("cpu", 0.01, 0.08)])
def test_the_rule_for_halves_is_wrong_where_they_were_measured(name: str, least: float, most: float) -> None:
    true = profile(name)
    learned = true.joined.split  # from whole passes
    assert least <= abs(iteration_us(learned) / iteration_us(true) - 1) <= most
