"""A watched training decided again from its log, and shown to another detector."""

from __future__ import annotations

import msgspec
import pytest
import torch
from support.training.virtual_loop import VirtualClock
from typer.testing import CliRunner

from unskew.analytics.core.run_state import LoggedControl
from unskew.analytics.detector.next_steps import with_next_step
from unskew.analytics.detector.verdicts import lost_verdict
from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.replay.recorded_run import RecordedRun
from unskew.analytics.replay.replay import replay
from unskew.cli import app
from unskew.collector.events import Probed, RankAttached, Verdict, VerdictClosed
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.spool import SpoolWriter
from unskew.edge.load_run import load_run
from unskew.edge.recorded_run import recorded_run
from unskew.runtime.attach.outside.watcher import JobWatcher
from unskew.runtime.attach.timeline import LoopTimeline
from unskew.terminal.sentences import sentence_of

RUN, RANKS, STEPS, SLOW_FROM = "watched", 2, 40, 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two ranks by a virtual clock, of which one runs its backward pass at half its speed from some step on."""
    store = Store.locate(tmp_path_factory.mktemp("store"))
    for rank in range(RANKS):
        _train(rank, store)
    watcher = JobWatcher(store, RUN, ["a test"], lambda _: None)
    watcher.finish(0)
    watcher.close()
    return store


def _train(rank: int, store: Store) -> None:
    clock, spool = VirtualClock(), SpoolWriter(store, RUN, f"rank-{rank:04d}.{rank}", flush_s=0.01)
    spool.append(RankAttached(rank=rank, ranks=RANKS, node="elsewhere", pid=rank))
    timeline = LoopTimeline(rank, RANKS, f"node:{rank}", spool.append, ready=clock.ready, now=clock.now)
    for step in range(STEPS):
        slow_ms = 40 if step >= SLOW_FROM else 0
        timeline.loading()
        timeline.loaded({"input_ids": torch.zeros(1, 64 + step * 37 % 50, dtype=torch.long)})
        clock.work(20)
        timeline.backward(None)
        clock.work(40 + slow_ms * rank)
        timeline.computed()
        clock.work(slow_ms * (1 - rank))
        timeline.returned()
        timeline.stepping()
        clock.work(2)
        timeline.stepped()
    timeline.finish()
    spool.close()


@pytest.fixture
def recorded(store: Store) -> RecordedRun:
    with open_store(store) as reader:
        return recorded_run(reader, RUN)


@pytest.mark.slow
def test_every_decision_comes_again_at_every_moment(recorded: RecordedRun) -> None:
    verdicts = [noted.event for noted in recorded.control if isinstance(noted.event, Verdict)]
    assert {(one.cause, one.culprits[0].rank) for one in verdicts} == {("slow_device", 1)}
    for until in (3, SLOW_FROM, 27, STEPS - 1):
        then = replay(recorded, until)
        assert (then.differences, then.alive) == ((), (0, 1)), until
    assert then.speeds[1]["B"] == pytest.approx(0.5, abs=0.05)
    assert then.compared >= STEPS + len(verdicts)
    cheated = {**recorded.judged, 5: msgspec.structs.replace(recorded.judged[5], predicted_us=1.0)}
    assert [one.event for one in replay(msgspec.structs.replace(recorded, judged=cheated)).differences] == ["iteration_judged"]


def test_a_hang_that_passed_is_taken_as_the_log_has_it(recorded: RecordedRun) -> None:
    """Nobody but the ranks' heartbeats knew of it."""
    suspect = Suspect(rank=1, how="hung", detail="it waits for nobody", victims=(0,))
    before = [noted for noted in recorded.control if not isinstance(noted.event, Verdict | VerdictClosed)]
    hung = lost_verdict(1, suspect, 10, replay(recorded).verdicts[0].config)
    hung = with_next_step(hung, can_be_probed=True, watched=True)
    over = VerdictClosed(verdict=1, until_iteration=12, at_iteration=12, reason="the job goes on")
    with_it = (*before[:3], LoggedControl(0, hung), LoggedControl(0, over), *before[3:])
    until_then = replay(msgspec.structs.replace(recorded, control=tuple(with_it)), 15)
    assert [(one.event, one.identity) for one in until_then.differences] == []


def test_a_probe_that_somebody_asked_for_is_taken_as_the_log_has_it(recorded: RecordedRun) -> None:
    probed = Probed(at_iteration=20, ranks=(1,), slowdowns={"1": 1.5}, links=(), cost_us=9, beside=True)
    with_it = (*recorded.control, LoggedControl(0, probed))
    assert replay(msgspec.structs.replace(recorded, control=with_it)).differences == ()


def test_a_verdict_says_what_to_do_next_where_it_is_found_and_asks_for_no_probe_when_the_training_is_over(
    store: Store, recorded: RecordedRun
) -> None:
    (verdict, *_) = (noted.event for noted in recorded.control if isinstance(noted.event, Verdict))
    assert verdict.evidence["next_step"].startswith("measure it by unskew probe while it trains; give it fewer samples")
    sentence = sentence_of(verdict)
    assert sentence is not None
    assert sentence.then == verdict.evidence["next_step"]
    with open_store(store) as reader:
        afterwards = diagnose(load_run(reader, RUN)).verdicts
    assert {"unskew probe" in one.evidence["next_step"] for one in afterwards} == {False}


@pytest.mark.slow
def test_other_detectors_are_shown_the_same_iterations(store: Store) -> None:
    def command(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--store", str(store.root)])
        assert done.exit_code == 0, done.output
        return done.output

    assert f"{STEPS} iterations: the live detector beside nvrx" in command("backtest", RUN, "--detector", "nvrx")
    assert "rank 1" in command("backtest", RUN, "--detector", "nvrx")
    assert "0 different" in command("replay", RUN)
    assert "fitted on iterations" in command("retrain", RUN)
