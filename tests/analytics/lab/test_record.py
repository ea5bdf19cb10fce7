"""A simulated job as a run in a store: what its log says of devices that go and come."""

from __future__ import annotations

from pathlib import Path

import pytest

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import JOBS
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.policies.registry import POLICIES
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.record_simulation import record

JOB = JOBS["llama2-7b"]
FIVE_SIX = [
    ClusterEvent(kind=kind, at_s=at_s, devices=(device,))  # type: ignore[arg-type]
    for kind, at_s, device in (
        ("failed", 600.0, 5), ("failed", 1200.0, 6), ("joined", 1800.0, 5), ("joined", 2400.0, 6), ("failed", 3000.0, 5),
    )
]  # fmt: skip
"""Two devices of rank 1's group die and come back; one of them dies again."""


@pytest.mark.parametrize(
    ("policy", "spares", "expected"),
    [
        ("resihp", 0, ["lost 5", "lost 6", "joined", "lost 5"]),
        ("checkpoint-restart", 3, ["lost 5", "joined", "lost 6", "joined", "lost 5", "joined"]),
        ("recover", 0, ["lost 5", "lost 6", "lost 5"]),  # lets nobody join
    ],
)
def test_every_loss_and_every_return_of_a_rank_is_in_the_log(
    tmp_path: Path, policy: str, spares: int, expected: list[str]
) -> None:
    """A group is back when it has all its devices, repaired or, with spares, replaced at once."""
    store = Store.locate(tmp_path / "store")
    outcome = simulate(JOB, POLICIES[policy](), FIVE_SIX, SimulationOptions(hours=1.0, spares=spares))
    record(store, "r", outcome, FIVE_SIX, {})
    with open_store(store) as reader:
        events = reader.sql(
            "select rank, split_part(type, '@', 1) as type, payload->>'detail' as detail from events "
            "where type like 'device%' order by seq"
        ).to_dicts()[JOB.dp * JOB.pp :]
        verdicts = reader.sql("select count(*) as n from verdicts where cause = 'dead'")["n"][0]
    assert {event["rank"] for event in events} == {1}
    changes = [("lost " + event["detail"].split()[-1]) if event["type"] == "device_lost" else "joined" for event in events]
    assert changes == expected
    assert verdicts == sum(one.startswith("lost") for one in expected)
