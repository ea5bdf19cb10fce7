"""The bench of policies plays one scenario on real ranks and in the simulator, and both take as long."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from unskew.benchmarks.report import bars
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.scheduler import policies, traces
from unskew.benchmarks.scheduler.policies import SCENARIOS, TwoWorlds
from unskew.collector.paths import Store


def test_each_policy_of_ours_has_a_row_of_its_own_on_every_trace() -> None:
    cells = traces._cells("llama2-7b,dp=8", "nodes that return")
    found: dict[str, float | None] = {}
    for number, cell in enumerate(cells):
        facts = {"effective": 10.0 * number, "capacity": 90.0, "losses": 3.0, "hours": 24.0}
        found |= {f"{cell.name}: {fact}": value for fact, value in facts.items()}
    rows = [traces._row("llama2-7b,dp=8", "nodes that return", name, found) for name in traces.OURS]
    share = {cell.params["policy"]: found[f"{cell.name}: effective"] for cell in cells}
    assert [row.value for row in rows] == [share["unskew"], share["joint"]]
    assert [row.bar for row in rows] == [share["checkpoint-restart"]] * 2
    assert rows[0].name.endswith("of Unskew")
    assert rows[1].name.endswith("of joint")
    assert "joint 10.0" in rows[0].note


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.usefixtures("forked")
def test_a_death_costs_as_much_live_as_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = msgspec.structs.replace(policies.VIRTUAL, layers=8)
    monkeypatch.setattr(policies, "APART", 20)
    with bars() as progress:
        found = policies.compared(Bench(progress, Store(tmp_path)), "malleus", SCENARIOS[1], options)
    assert isinstance(found, TwoWorlds), found
    assert found.same_plan
    assert found.worst_percent < 1.0, found
    assert found.live_s[1] > 1.1 * found.live_s[0]
