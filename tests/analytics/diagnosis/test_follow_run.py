"""A finished run followed by the controller's rules: what the live run found, whatever its log lacks of the rest."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from support.training.runtime_runs import SMALL, Run, light, train

from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.diagnosis.failslow import FailSlowResult, follow_run, rehearsal_of, settled
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.collector.events import (
    AdaptationStarted,
    Control,
    DeviceLost,
    PlanApplied,
    Probed,
    Regrouped,
    Verdict,
    VerdictClosed,
)
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run

pytestmark = [pytest.mark.limit(240), pytest.mark.slow]

SLOW, DEAD, DIED = (1, 3, 5), 4, 52
# Iterations of virtual time take none of a controller's: in these the ranks wait for it, so that it acts before the death.
PAUSES = (f"hang:rank=0,at={at},seconds=0.4" for at in range(34, 42))
FAULTS = (*(f"slow:rank={rank},factor=1.7,at=28" for rank in SLOW), f"kill:rank={DEAD},at={DIED}", *PAUSES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All ranks of the last stage turn slow alike, are probed and named; later one of the others dies. No plan that would move
    layers, and with them begin all comparisons anew, is approved."""
    folder, layout = tmp_path_factory.mktemp("followed"), {"pp": 2, "dp": 3, "micro_batches": 6}
    return train(folder, *FAULTS, base=light(SMALL), iterations=64, mode="approve", **layout)


@pytest.fixture(scope="module")
def log(run: Run) -> Iterator[RunLog]:
    with open_store(run.store) as reader:
        yield load_run(reader, run.id)


def culprits(found: FailSlowResult) -> list[tuple[str, int]]:
    return [(one.cause, party.rank) for one in found.findings.verdicts for party in one.culprits if party.rank is not None]


def with_control(log: RunLog, *events: Control) -> RunLog:
    return msgspec.structs.replace(log, control=events)


def test_a_verdict_that_a_probe_confirmed_is_in_the_diagnosis_and_all_are_those_of_the_run(run: Run, log: RunLog) -> None:
    assert len(run.of(Probed)) == 1
    live = settled(event for event in run.events if isinstance(event, Verdict | VerdictClosed))
    by_probe = [one.culprits[0].rank for one in live if one.evidence.get("test") == "probe"]
    assert by_probe == list(SLOW)
    assert [one.cause for one in live].count("dead") == 1
    assert follow_run(log).findings.verdicts == live
    found = diagnose(log)
    assert found.outcome == "wrong"
    assert [one.culprits[0].rank for one in found.verdicts if one.evidence.get("test") == "probe"] == list(SLOW)


def test_nobody_seeks_a_plan_for_a_run_that_is_over(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(*_: object) -> None:
        pytest.fail("the Scheduler was asked")

    monkeypatch.setattr("unskew.analytics.loop.plans.propose", propose)
    assert culprits(follow_run(log))


def test_a_log_of_an_old_version_names_the_same(log: RunLog) -> None:
    """Without site, watermarks, or when and in whose company a rank was lost; the last regrouping is missing, too."""

    def old(event: Control) -> Control:
        match event:
            case DeviceLost():
                return msgspec.structs.replace(event, watermark=None, iteration=None, victims=())
            case PlanApplied():
                return msgspec.structs.replace(event, watermark=None)
        return event

    last = max(log.regrouped_s)
    without = [
        old(event)
        for event in log.control
        if not isinstance(event, AdaptationStarted) and not (isinstance(event, Regrouped) and event.plan_version == last)
    ]
    found = follow_run(with_control(log, *without))
    assert culprits(found) == culprits(follow_run(log))
    (dead,) = [one for one in found.findings.verdicts if one.cause == "dead"]
    assert (dead.culprits[0].rank, dead.at_iteration) == (DEAD, DIED)
    assert DEAD not in {party.rank for party in dead.victims}
    assert dead.victims


def test_of_a_log_whose_beginning_is_pruned_no_probe_of_a_suspect_is_taken_for_a_healthy_one(run: Run, log: RunLog) -> None:
    (probed,) = run.of(Probed)
    kept = tuple(one for one in log.released if one.committed.iteration >= 12)
    assert any(one.probes for one in kept)
    found = follow_run(msgspec.structs.replace(log, released=kept))
    assert culprits(found) == [("dead", DEAD)]
    assert found.findings.sight.smallest_slowdown is not None
    late = tuple(one for one in log.released if one.committed.iteration >= probed.at_iteration)
    assert culprits(follow_run(msgspec.structs.replace(log, released=late))) == [("dead", DEAD)]


def test_a_resumed_run_is_followed_from_where_it_went_on(log: RunLog) -> None:
    (started,) = [event for event in log.control if isinstance(event, AdaptationStarted)]
    resumed = msgspec.structs.replace(started, site={**started.site, "first_iteration": 30})
    assert rehearsal_of(with_control(log, resumed)).state.adaptation.site.first_iteration == 30


def test_iterations_that_nobody_judged_are(run: Run, log: RunLog) -> None:
    """What the controller logged ends before its first verdict; the ranks went on for a while."""
    (probed,) = run.of(Probed)
    at = next(i for i, event in enumerate(log.control) if isinstance(event, Verdict))
    first = tuple(one for one in log.released if one.committed.iteration < probed.at_iteration)
    found = follow_run(msgspec.structs.replace(log, released=first, control=log.control[:at]))
    assert [one.cause for one in found.findings.verdicts] == ["stage_imbalance"]
