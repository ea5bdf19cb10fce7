"""A real run decided again from its log: the same at every moment, whatever the order of arrival; and a false log is told."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from runtime_runs import LONG_CHUNKS, Run, train
from typer.testing import CliRunner

from unskew.analytics.recording import Recording, recording, recording_of
from unskew.analytics.replay import ReplayError, replay
from unskew.cli import app
from unskew.collector.events import IterationJudged, PlanApplied, PlanProposed, Span, Verdict
from unskew.collector.reader import open_store

pytestmark = pytest.mark.limit(180)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A rank turns slow, a plan is proposed and applied by itself, another rank dies."""
    folder = tmp_path_factory.mktemp("replayed")
    faults = ("slow:rank=1,factor=1.8,at=11", "kill:rank=2,at=24")
    return train(folder, *faults, base=LONG_CHUNKS, mode="auto", iterations=32)


@pytest.fixture(scope="module")
def log(run: Run) -> Recording:
    with open_store(run.store) as reader:
        return recording(reader, run.id)


def test_every_decision_comes_again_at_every_moment(run: Run, log: Recording) -> None:
    assert {event.cause for event in run.of(Verdict)} == {"slow_device", "dead"}
    assert [event.optional for event in run.of(PlanProposed)][:2] == [True, False]
    whole = replay(log)
    assert whole.differences == ()
    assert whole.compared > 40
    assert whole.plan.epoch == run.of(PlanApplied)[-1].epoch
    for until in (3, 12, 15, 19, 23, 24, 28):
        then = replay(log, until)
        assert then.differences == (), until
        # What the live run knew at that moment, from its own record.
        known = {event.rank for event in log.judged[until].ranks}
        assert known <= set(then.plan.ranks)
        assert then.plan.epoch == log.judged[until].epoch
        slow = [event for event in run.of(Verdict) if event.cause == "slow_device" and event.at_iteration <= until]
        assert bool(then.speeds) == bool(slow)


def test_the_order_in_which_the_log_arrived_does_not_matter(run: Run, log: Recording) -> None:
    with open_store(run.store) as reader:
        rows = reader.sql(
            "select writer, seq, at_us, stream, payload::varchar from events where run = ? order by writer, seq", [run.id]
        ).rows()
    lines = [(writer, seq, at_us, stream, line.encode()) for writer, seq, at_us, stream, line in rows]
    random.Random(5).shuffle(lines)
    assert recording_of(run.id, lines) == log


def test_a_decision_that_the_log_does_not_lead_to_is_told(log: Recording) -> None:
    def told(event: object) -> object:
        if isinstance(event, Verdict) and event.cause == "slow_device":
            return msgspec.structs.replace(event, culprits=(msgspec.structs.replace(event.culprits[0], rank=0),))
        return event

    forged = msgspec.structs.replace(
        log, control=tuple(msgspec.structs.replace(noted, event=told(noted.event)) for noted in log.control)
    )
    found = {(one.event, one.fields) for one in replay(forged).differences}
    assert found == {("verdict", ("culprits",))}


def test_a_changed_measurement_is_told(log: Recording) -> None:
    """The log's times of one rank in one iteration made longer: its judgement cannot be what was recorded."""
    telemetry = tuple(
        msgspec.structs.replace(event, compute_us=2 * (event.compute_us or 0))
        if isinstance(event, Span) and event.rank == 3 and event.iteration == 20
        else event
        for event in log.telemetry
    )
    found = replay(msgspec.structs.replace(log, telemetry=telemetry), 20).differences
    assert (found[0].event, found[0].identity) == ("iteration_judged", {"iteration": 20})


def test_a_lost_decision_is_told(log: Recording) -> None:
    control = tuple(noted for noted in log.control if not isinstance(noted.event, Verdict))
    found = replay(msgspec.structs.replace(log, control=control), 16).differences
    assert len(found) == 1
    assert found[0].sentence.endswith("is only in the replay")


def test_the_command_says_the_state_and_refuses_what_cannot_be_replayed(run: Run, log: Recording, tmp_path: Path) -> None:
    store = str(run.store.root)
    answer = CliRunner().invoke(app, ["replay", run.id, "--until", "16", "--store", store, "--json", str(tmp_path / "r.json")])
    assert answer.exit_code == 0, answer.output
    facts = json.loads((tmp_path / "r.json").read_text())
    assert facts["differences"] == []
    assert facts["until"] == 16
    slow = {one["rank"]: one["speed"] for one in facts["health"]}[1]
    assert slow["F"] == pytest.approx(1 / 1.8, rel=0.05)
    assert f"run {run.id} after iteration 16" in answer.output
    refused = CliRunner().invoke(app, ["replay", run.id, "--until", "99", "--store", store])
    assert refused.exit_code == 2
    with pytest.raises(ReplayError, match="no adaptation_started"):
        replay(msgspec.structs.replace(log, control=log.control[:1]))
    assert isinstance(log.judged[0], IterationJudged)
