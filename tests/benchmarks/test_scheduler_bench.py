"""The bench of policies plays one scenario on real ranks and in the simulator, and both take as long."""

from __future__ import annotations

from pathlib import Path

import pytest

from unskew.benchmarks.report import bars
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.scheduler import policies
from unskew.benchmarks.scheduler.policies import SCENARIOS, TwoWorlds
from unskew.collector.paths import Store


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.usefixtures("forked")
def test_a_death_costs_as_much_live_as_simulated(tmp_path: Path) -> None:
    with bars() as progress:
        found = policies.compared(Bench(progress, Store(tmp_path)), "malleus", SCENARIOS[1])
    assert isinstance(found, TwoWorlds), found
    assert found.same_plan
    assert found.worst_percent < 1.0, found
    assert found.live_s[1] > 1.1 * found.live_s[0]
