"""Schedules executed for real: the order of the work changes, the gradients do not, also when a rank dies."""

import pytest
from support.training.runtime_runs import train

from unskew.analytics.core.plan import splits_backward
from unskew.collector.events import Regrouped

pytestmark = pytest.mark.slow

OPTIONS = {"dp": 2, "pp": 2, "micro_batches": 8, "iterations": 4}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return train(tmp_path_factory.mktemp("1f1b"), **OPTIONS).losses


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    ("schedule", "faults"),
    [("gpipe", []), ("zb-v", []), ("interleaved", ["kill:rank=1,at=2"]), ("zb-h1", ["kill:rank=1,at=2"])],
)
def test_every_schedule_learns_what_1f1b_learns(tmp_path, reference, schedule, faults):
    run = train(tmp_path, *faults, schedule=schedule, **OPTIONS)
    assert run.losses == pytest.approx(reference, abs=1e-8)
    assert len(run.of(Regrouped)) == 1 + len(faults)  # the start is the first
    kinds = {row["kind"] for row in run.sql("select distinct kind from chunks where run = $run")}
    assert kinds == ({"F", "B", "W"} if splits_backward(schedule) else {"F", "B"})
    times = run.sql("select distinct times from executed($run)")
    assert [row["times"] for row in times] == [1]
