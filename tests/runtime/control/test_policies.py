"""Runs that follow a published policy: the very object that the simulator plays decides on real ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, train

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.core.layout import to_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.loop.by_policy.view import job_of
from unskew.analytics.policies.registry import POLICIES
from unskew.collector.events import PlanApplied, RunStarted
from unskew.runtime.control.allowed import check
from unskew.runtime.options import OptionsError, RunOptions

pytestmark = [pytest.mark.limit(90), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return undisturbed_losses(SMALL)


@pytest.mark.parametrize("name", ["recycle", "oobleck", "recover", "malleus", "resihp", "unskew"])
def test_a_death_is_answered_by_the_plan_of_the_simulator(name: str, tmp_path: Path, undisturbed: list[float]) -> None:
    run = train(tmp_path, "kill:rank=1,at=5", policy=name)
    assert run.losses == pytest.approx(undisturbed, rel=0, abs=1e-8)
    (started,) = run.of(RunStarted)
    assert (started.policy, run.summary.policy) == (name, name)
    plans = [Plan.from_data(event.plan) for event in run.of(PlanApplied)]
    job = job_of(plans[0], (1,) * plans[0].n_layers, None, ())
    death = ClusterEvent(kind="failed", at_s=100.0, devices=(1,))
    outcome = simulate(job, POLICIES[name](), [death], SimulationOptions(hours=1.0))
    layout = outcome.answers[0 if name == "unskew" else -1].reaction.layout  # unskew is asked again two iterations later
    assert layout is not None
    assert to_plan(layout, job.n_layers).digest == plans[1].digest


def test_a_hurt_group_runs_with_fewer_members_beside_whole_ones(tmp_path: Path) -> None:
    """NTP packs the groups that lost somebody into one replica, whose other groups become as small. Rank 1 would leave with
    half of a layer that rank 5 had, too: so it stays until it can hand over."""
    options = msgspec.structs.replace(SMALL, tp=2, heads=2, iterations=20, policy="ntp")
    run = train(tmp_path, "kill:rank=5,at=8", base=options)
    assert run.losses == pytest.approx(undisturbed_losses(options), rel=0, abs=1e-8)
    first, *_, last = (Plan.from_data(event.plan) for event in run.of(PlanApplied))
    job = job_of(first, (1,) * first.n_layers, None, (), units=2)
    death = ClusterEvent(kind="failed", at_s=100.0, devices=(5,))
    outcome = simulate(job, POLICIES["ntp"](), [death], SimulationOptions(hours=1.0))
    layout = outcome.answers[-1].reaction.layout
    assert layout is not None
    assert [pipeline.groups for pipeline in layout.pipelines] == [((4,), (0,)), ((2, 3), (6, 7))]
    assert to_plan(layout, job.n_layers).digest == last.digest


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": "bamboo"}, "--policy bamboo is simulated only: ranks execute no redundant forward pass"),
        ({"policy": "recycle-staggered"}, "--policy recycle-staggered is simulated only: ranks step their optimisers together"),
        ({"policy": "pray"}, "--policy pray is not known, allowed: oobleck, recycle"),
        ({"policy": "recycle", "schedule": "gpipe"}, "--policy recycle plans for 1f1b and zb-h1, not for --schedule gpipe"),
        ({"policy": "recycle", "recovery": "ft-hsdp"}, "--policy recycle is not for --recovery ft-hsdp"),
    ],
)
def test_what_ranks_cannot_execute_is_refused_by_name(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionsError, match=sentence):
        check(RunOptions(**options))
