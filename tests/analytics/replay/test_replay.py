"""A real run decided again from its log: the same at every moment, whatever the order of arrival; a false log is told; and
another detector over the same log says what it would have said."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.training.runtime_runs import LONG_CHUNKS, Run, light, train
from typer.testing import CliRunner, Result

from unskew.analytics.core.run_state import LoggedControl
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.published.validation import Probe
from unskew.analytics.lab.baselines.ours import UnskewDetector
from unskew.analytics.replay.backtest import backtest
from unskew.analytics.replay.causes import ReplayError, started_of
from unskew.analytics.replay.method import MethodInput, MethodOutput
from unskew.analytics.replay.recorded_run import RecordedRun, run_of_lines
from unskew.analytics.replay.replay import Replay, replay
from unskew.cli import app
from unskew.collector.events import Party, PlanApplied, PlanProposed, PlanRejected, PredictorFitted, RunStarted, Span, Verdict
from unskew.collector.read.reader import open_store
from unskew.edge.recorded_run import recorded_run

pytestmark = [pytest.mark.limit(180), pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A rank turns slow, a plan is proposed and applied by itself, another rank dies."""
    folder = tmp_path_factory.mktemp("replayed")
    faults = ("slow:rank=1,factor=1.8,at=11", "kill:rank=2,at=24")
    return train(folder, *faults, base=light(LONG_CHUNKS), mode="auto", iterations=32)


@pytest.fixture(scope="module")
def log(run: Run) -> RecordedRun:
    with open_store(run.store) as reader:
        return recorded_run(reader, run.id)


def test_every_decision_comes_again_at_every_moment(run: Run, log: RecordedRun) -> None:
    assert {event.cause for event in run.of(Verdict)} >= {"slow_device", "dead"}
    assert {event.optional for event in run.of(PlanProposed)} == {True, False}
    whole = replay(log)
    assert whole.differences == ()
    assert whole.compared > 40
    assert whole.plan.plan_version == run.of(PlanApplied)[-1].plan_version
    for until in (3, 12, 15, 19, 23, 24, 28):
        then = replay(log, until)
        assert then.differences == (), until
        # What the live run knew at that moment, from its own record.
        known = {event.rank for event in log.judged[until].ranks}
        assert known <= set(log.plans[log.judged[until].plan_version].ranks)
        applied = [
            event.plan_version for event in run.of(PlanApplied) if event.watermark is not None and event.watermark <= until + 1
        ]
        assert then.plan.plan_version == applied[-1]
        slow = [event for event in run.of(Verdict) if event.cause == "slow_device" and event.at_iteration <= until]
        assert bool(then.speeds) == bool(slow)


def test_the_order_in_which_the_log_arrived_does_not_matter(run: Run, log: RecordedRun) -> None:
    with open_store(run.store) as reader:
        rows = reader.sql(
            "select writer, seq, at_us, stream, payload::varchar from events where run = ? order by writer, seq", [run.id]
        ).rows()
    lines = [(writer, seq, at_us, stream, line.encode()) for writer, seq, at_us, stream, line in rows]
    random.Random(5).shuffle(lines)
    assert run_of_lines(run.id, lines) == log


def test_a_decision_that_the_log_does_not_lead_to_is_a_difference_and_another_wording_is_none(log: RecordedRun) -> None:
    def forged(event: object) -> object:
        if isinstance(event, Verdict) and event.cause == "slow_device":
            return msgspec.structs.replace(event, culprits=(msgspec.structs.replace(event.culprits[0], rank=0),))
        if isinstance(event, Verdict):
            return msgspec.structs.replace(event, sentence="in other words", evidence={**event.evidence, "detail": "too"})
        if isinstance(event, PlanProposed) and event.optional:
            return msgspec.structs.replace(event, reason="in other words", change="")
        return event

    control = tuple(msgspec.structs.replace(noted, event=forged(noted.event)) for noted in log.control)
    found = {(one.event, one.fields) for one in replay(msgspec.structs.replace(log, control=control)).differences}
    assert found == {("verdict", ("culprits",)), ("plan_proposed", ("change",))}


def test_a_run_of_an_older_version_is_decided_alike_though_fields_and_thresholds_came_since(log: RecordedRun) -> None:
    def older(event: object) -> object:
        if isinstance(event, PredictorFitted):
            since = ("blocking", "message_token_us")
            return msgspec.structs.replace(event, model={k: v for k, v in event.model.items() if k not in since})
        return msgspec.structs.replace(event, config="of fewer thresholds") if isinstance(event, Verdict) else event

    def before(event: object) -> object:
        return msgspec.structs.replace(event, code="older") if isinstance(event, RunStarted) else older(event)

    def replayed(change: Callable[[object], object]) -> Replay:
        control = tuple(msgspec.structs.replace(noted, event=change(noted.event)) for noted in log.control)
        return replay(msgspec.structs.replace(log, control=control))

    assert {one.fields for one in replayed(older).differences} == {("config",)}
    assert replayed(before).differences == ()


def test_a_changed_measurement_is_told(log: RecordedRun) -> None:
    """The log's times of one rank in one iteration made longer: its judgement cannot be what was recorded."""
    telemetry = tuple(
        msgspec.structs.replace(event, compute_us=2 * (event.compute_us or 0))
        if isinstance(event, Span) and event.rank == 3 and event.iteration == 20
        else event
        for event in log.telemetry
    )
    found = replay(msgspec.structs.replace(log, telemetry=telemetry), 20).differences
    assert (found[0].event, found[0].identity) == ("iteration_judged", {"iteration": 20})


def test_a_proposal_is_open_until_somebody_decided_and_no_longer(log: RecordedRun) -> None:
    """Decisions of people tell no iteration and may come long before the next event that does."""
    open_proposal = next(noted for noted in log.control if isinstance(noted.event, PlanProposed) and noted.event.optional)
    assert isinstance(open_proposal.event, PlanProposed)
    proposed = LoggedControl(open_proposal.at_us, msgspec.structs.replace(open_proposal.event, proposal="px"))
    rejected = LoggedControl(log.judged_us[20] + 1, PlanRejected(proposal="px", by="a person", reason="not now"))
    control = sorted((*log.control, proposed, rejected), key=lambda noted: noted.at_us)
    people = msgspec.structs.replace(log, control=tuple(control))
    for until in (open_proposal.event.at_iteration, 19, 20, 21):
        assert ("px" in {one.proposal for one in replay(people, until).proposals}) == (until < 20), until


def test_what_nobody_had_judged_yet_is_no_difference(log: RecordedRun) -> None:
    """A run that goes on, or whose controller was killed: ranks committed more than was judged, or than was handed over."""
    control = tuple(noted for noted in log.control if noted.at_us < log.judged_us[22])
    left = max(number for number, at_us in log.judged_us.items() if at_us < log.judged_us[22])  # several are judged at once
    then = replay(msgspec.structs.replace(log, control=control, judged={n: log.judged[n] for n in range(left)}))
    assert (abs(then.until - left) <= 1, then.differences) == (True, ())


def test_a_lost_decision_is_told(log: RecordedRun) -> None:
    lost = [noted for noted in log.control if isinstance(noted.event, Verdict) and noted.event.cause == "slow_device"]
    control = tuple(noted for noted in log.control if noted not in lost)
    found = replay(msgspec.structs.replace(log, control=control)).differences
    assert len(found) == len(lost) > 0
    assert all(one.event == "verdict" and one.sentence.endswith("is only in the replay") for one in found)


def test_the_command_says_the_state_and_refuses_what_cannot_be_replayed(run: Run, log: RecordedRun, tmp_path: Path) -> None:
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
    pruned = tuple(event for event in log.telemetry if event.iteration >= 5)  # type: ignore[attr-defined]
    with pytest.raises(ReplayError, match="begins at iteration 5"):
        replay(msgspec.structs.replace(log, telemetry=pruned))


# --- backtest --------------------------------------------------------------------------------------------------------


def test_the_same_thresholds_say_the_same_and_blunter_ones_less(log: RecordedRun) -> None:
    own = msgspec.convert(started_of(log).site["detector"], DetectorOptions)
    same = backtest(log, UnskewDetector(own))
    assert [(pair.culprits, pair.change) for pair in same.pairs] == [("rank 1", "same")]
    assert (same.live, same.other) == (same.other, same.live)
    assert (same.live.found, same.live.injected, same.live.false) == (1, 1, 0)
    blunt = backtest(log, UnskewDetector(msgspec.structs.replace(own, least_slowdown=2.5)))
    assert [pair.change for pair in blunt.pairs] == ["fewer"]
    assert (blunt.other.found, blunt.other.verdicts) == (0, 0)
    patient = backtest(log, UnskewDetector(msgspec.structs.replace(own, least_iterations=8)))
    assert [(pair.change, pair.iterations > 0) for pair in patient.pairs] == [("later", True)]


class FalseAlarm:
    """Names rank 3 at iteration 10, wrongly."""

    name = "accuser"

    def observe(self, observed: MethodInput, probe: Probe | None = None) -> MethodOutput:  # noqa: ARG002  # the interface's
        if observed.committed.iteration != 10:
            return MethodOutput()
        verdict = Verdict(
            verdict=1,
            cause="slow_device",
            culprits=(Party(kind="device", rank=3),),
            since_iteration=8,
            at_iteration=10,
            confidence=1.0,
            sentence="rank 3 it is",
            evidence={},
        )
        return MethodOutput(verdicts=(verdict,), alarm="rank 3 it is")


def test_a_false_accusation_counts_as_one_more_and_wrong(log: RecordedRun) -> None:
    found = backtest(log, FalseAlarm())
    assert [(pair.culprits, pair.change) for pair in found.pairs] == [("rank 3", "more"), ("rank 1", "fewer")]
    assert found.other.false == 1
    assert found.alarms == ((10, "rank 3 it is"),)


def test_the_backtest_command_takes_a_file_or_a_method_and_refuses_the_rest(run: Run, tmp_path: Path) -> None:
    (tmp_path / "blunt.toml").write_text("least_slowdown = 2.5\n")
    (tmp_path / "typo.toml").write_text("least_slodown = 2.5\n")
    (tmp_path / "wild.toml").write_text("least_slowdown = 0.5\n")
    (tmp_path / "nan.toml").write_text("least_slowdown = nan\n")
    (tmp_path / "gain.toml").write_text("noise_gain = -5.0\n")

    def command(config: str, *more: str) -> Result:
        return CliRunner().invoke(app, ["backtest", run.id, "--detector", config, "--store", str(run.store.root), *more])

    answer = command(str(tmp_path / "blunt.toml"), "--json", str(tmp_path / "b.json"))
    assert answer.exit_code == 0, answer.output
    facts = json.loads((tmp_path / "b.json").read_text())
    assert facts["changes"] == {"same": 0, "earlier": 0, "later": 0, "fewer": 1, "more": 0}
    assert facts["settings"] == {"least_slowdown": 2.5}
    assert command("unskew").exit_code == 0
    for config, sentence in (
        (str(tmp_path / "typo.toml"), "least_slodown is not a threshold"),
        (str(tmp_path / "wild.toml"), "must be above 1"),
        (str(tmp_path / "nan.toml"), "least_slowdown is nan, it must be a finite number"),
        (str(tmp_path / "gain.toml"), "noise_gain and baseline_gain must be above 0"),
        ("oracle", "neither a TOML file nor a method"),
    ):
        refused = command(config)
        assert refused.exit_code == 2
        assert sentence in refused.output
