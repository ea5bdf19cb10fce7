"""Schedules executed for real: the order of the work changes, the gradients do not."""

import pytest
from runtime_runs import SMALL, train

from unskew.analytics.schedule import splits_backward


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return train(tmp_path_factory.mktemp("1f1b"), dp=2, pp=2, micro_batches=8, iterations=4).losses


@pytest.mark.limit(120)
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "zb-v"])
def test_every_schedule_learns_what_1f1b_learns(tmp_path, reference, schedule):
    run = train(tmp_path, schedule=schedule, dp=2, pp=2, micro_batches=8, iterations=4)
    assert run.losses == pytest.approx(reference, abs=1e-8)
    kinds = {row["kind"] for row in run.sql("select distinct kind from chunks where run = $run")}
    assert kinds == ({"F", "B", "W"} if splits_backward(schedule) else {"F", "B"})
    times = run.sql("select distinct times from executed($run)")
    assert [row["times"] for row in times] == [1]


@pytest.mark.limit(120)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
def test_a_death_under_any_schedule_costs_no_accuracy(tmp_path, reference, schedule):
    run = train(tmp_path, "kill:rank=1,at=2", schedule=schedule, dp=2, pp=2, micro_batches=8, iterations=4)
    assert run.losses == pytest.approx(reference, abs=1e-8)
    assert SMALL.layers == 4
