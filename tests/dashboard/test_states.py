"""The page in each state a run can be in, over a store written by the collector's own writers."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from streamlit.testing.v1 import AppTest
from support.dashboard import runs
from support.dashboard.pages import FOLDER, page, text

from unskew.collector.events import CommandRefused, Dropped, Mode, Note, PlanRejected, RunFinished, VerdictClosed
from unskew.collector.files.manifest import Manifest, publish
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write import control_stream
from unskew.collector.write.commands import Inbox, hold_controller_lock
from unskew.dashboard import data
from unskew.report.page import report


@pytest.mark.usefixtures("store")
def test_empty_store_says_so() -> None:
    assert "0 runs in this store" in text(page())


@pytest.mark.slow
def test_healthy_run_is_called_healthy_and_offers_no_decision(store: Store) -> None:
    writer = runs.healthy(store, iterations=12)
    with hold_controller_lock(store, "healthy"):
        writer.close()
        app = page("healthy")
    assert "Well: a lasting slowdown of any device by 15 % or more would have been named." in text(app)
    assert "0 proposals yet" in text(app)
    assert "0 verdicts so far" in text(app)
    assert not [button for button in app.button if button.label == "Approve"]
    assert {metric.label: metric.value for metric in app.metric}["Ranks"] == "8 of 8"


@pytest.mark.slow
def test_a_run_that_lost_its_controller_is_over(store: Store) -> None:
    runs.healthy(store, iterations=3).close()
    shown = text(page("healthy"))
    assert "The controller is gone" in shown
    assert "0 proposals were made in this run." in shown
    assert "so far." not in shown


@pytest.mark.slow
def test_slow_rank_is_the_culprit_and_its_peers_are_victims(store: Store) -> None:
    writer = runs.slow(store)
    with hold_controller_lock(store, "slow"):
        writer.close()
        app = page("slow")
    shown = text(app)
    assert "Rank 3 runs at 0.55 of its healthy speed since iteration 30." in shown
    assert "Ranks 0–2 only wait for it: victims, not at fault." in shown
    assert '<h3 class="u-title">Skew' in shown
    (chart,) = [json.loads(one.proto.spec)["data"][0] for one in app.get("plotly_chart") if "skew" in one.proto.id]
    assert (chart["type"], chart["y"][-1]) == ("waterfall", "<b>whole job</b>")
    assert re.search(r"Slow devices lose [\d.]+ m?s per iteration, .* Rank 3 took longest in 1?\d\d % of the", shown)
    assert "proposal p1 waits for you: " in shown
    assert "Plan 1 as proposed" in shown
    assert "was 4 layers, 8 mb" in shown


@pytest.mark.slow
def test_what_waits_for_a_person_is_shown_before_what_is_answered(store: Store) -> None:
    writer = runs.waiting_after_death(store)
    with hold_controller_lock(store, "waiting"):
        writer.close()
        shown, listed = text(page("waiting")), text(page())
    headline = shown[shown.index('data-testid="headline"') :]
    headline = headline[: headline.index("</div></div>")]
    slow, waits, answered = (
        headline.index("Rank 3 runs at 0.55"),
        headline.index("proposal p3 waits for you: "),
        headline.index("Open verdict: Rank 6 is dead"),
    )
    assert slow < waits < answered
    assert "Answered by plan 1." in headline[answered:]
    assert "answered by" not in headline[:answered]
    assert "For rank 3, slow device; rank 6, dead." in shown
    assert "p3 waits for you" in listed
    assert "2 of 2 verdicts open" in listed
    assert '; 1 more verdict">' in listed, "as the page has it"
    data.runs.clear()
    assert "p3 waited for you" in text(page()), "its controller is gone, and the proposal open still"


@pytest.mark.slow
def test_a_proposal_that_waits_is_shown_before_a_death_that_is_answered(store: Store) -> None:
    """Nothing else is wrong: the survivors' better plan waits, and nobody can do anything about the death any more."""
    writer = runs.waiting_after_death(store)
    writer.control(VerdictClosed(verdict=1, until_iteration=37, at_iteration=40, reason="as fast as the others again"))
    with hold_controller_lock(store, "waiting"):
        writer.close()
        shown = text(page("waiting"))
    headline = shown[shown.index('u-sentence"') :]
    waits, dead = headline.index("Proposal p3 waits for you: "), headline.index("Rank 6 is dead")
    assert waits < dead < headline.index("Answered by plan 1.")


@pytest.mark.slow
def test_the_list_counts_the_verdicts_that_are_open_on_the_page(store: Store) -> None:
    """A death whose rank is back stood in the list as open for ever."""
    writer = runs.rejoined(store, joins=True)
    writer.control(RunFinished(status="done", iterations=writer.iteration, committed=writer.iteration))
    writer.close()
    assert "0 of 1 verdict open" in text(page())
    shown = text(page("rejoined"))
    assert "Rank(s) 6 are lost." in shown, "what was wrong in a run that is over"
    assert "closed by now" not in shown, "which counts it already"


@pytest.mark.slow
def test_a_verdict_that_was_revised_has_one_onset(store: Store) -> None:
    """A ramp: the sentence dates the last change, the rest of the page and SQL the beginning."""
    writer = runs.slow(store)
    slower = "Rank 3 runs at 0.40 of its healthy speed since iteration 50."
    writer.control(msgspec.structs.replace(runs.slow_verdict(), since_iteration=50, at_iteration=54, sentence=slower))
    with hold_controller_lock(store, "slow"):
        writer.close()
        shown = text(page("slow"))
        assert f"<h3>{slower}</h3><p>first in iteration 30 · open" in report(open_store(store), "slow", controlled=True)
    headline = shown[shown.index('data-testid="headline"') :]
    headline = headline[: headline.index("</div></div>")]
    assert slower in headline
    assert "first in iteration 30" in headline
    assert headline.count("since iteration") == 1
    assert data.sql("select since_iteration, sentence from verdicts").rows() == [(30, slower)]


@pytest.mark.slow
def test_a_limit_that_auto_reached_is_shown_with_the_proposal(store: Store) -> None:
    writer = runs.slow(store, mode="auto")
    writer.control(
        CommandRefused(command="approve p1", by="auto", reason="20 changes are made, mode auto makes no more in a run")
    )
    with hold_controller_lock(store, "slow"):
        writer.close()
        shown = text(page("slow"))
    assert "20 changes are made, mode auto makes no more in a run" in shown
    assert "proposal p1 waits for you: " in shown


@pytest.mark.slow
def test_a_limit_of_auto_that_passes_is_in_the_headline_and_waits_for_nobody(store: Store) -> None:
    """Looked at in the moment in which auto says it, as the run goes on."""
    writer, waits = runs.slow(store, mode="auto"), "p1 waits until iteration 218: mode auto makes 20 changes in 200 iterations"
    writer.control(Note(text=waits, by="auto", proposal="p1"))
    with hold_controller_lock(store, "slow"):
        writer.close()
        shown, listed = text(page("slow")), text(page())
    headline = shown[shown.index('data-testid="headline"') :]
    assert waits in headline[: headline.index("</div></div>")]
    assert "waits for you" not in shown + listed
    assert "1 of 1 verdict open" in listed


@pytest.mark.slow
def test_a_run_whose_log_is_not_whole_is_not_called_well(store: Store) -> None:
    writer = runs.healthy(store, iterations=12)
    reason = "the log holds 12 of the 40 iterations that were committed, 7 events could not be written (full)"
    writer.control(RunFinished(status="incomplete", iterations=12, committed=40, unwritten=7, reason=reason))
    writer.close()
    shown, listed = text(page("healthy")), text(page())
    assert f"The log is incomplete: {reason}." in shown
    assert "nothing was wrong" not in shown
    assert '<span class="u-chip u-bad">incomplete</span>' in listed


def ask_for_approval() -> None:
    """A script that is nothing but the open dialog (AppTest closes a dialog at each click elsewhere)."""
    from unskew.dashboard import data  # noqa: PLC0415 - AppTest runs the body alone
    from unskew.dashboard.panels import dialogs  # noqa: PLC0415 - AppTest runs the body alone

    dialogs.approve("slow", data.snapshot("slow").state.proposals["p1"])


def test_approval_needs_name_and_reason_and_reaches_the_controller(store: Store) -> None:
    writer = runs.slow(store)
    with hold_controller_lock(store, "slow"):
        writer.close()
        dialog = AppTest.from_function(ask_for_approval, default_timeout=30).run()
        dialog.text_input(key="by-approve").set_value("mira")
        dialog.button(key="send-approve").click().run()
        assert "A name and a reason are both needed" in dialog.error[0].value
        assert Inbox(store, "slow").poll()[0] == []
        dialog.text_area(key="reason-approve").set_value("hours to go")
        dialog.button(key="send-approve").click().run()
        assert not dialog.exception, dialog.exception
        (command,) = Inbox(store, "slow").poll()[0]
        assert (command.kind, command.target, command.by, command.reason) == ("approve", "p1", "mira", "hours to go")


@pytest.mark.slow
def test_a_sent_approval_waits_for_the_controller_and_cannot_be_sent_twice(store: Store) -> None:
    writer = runs.slow(store)
    with hold_controller_lock(store, "slow"):
        writer.close()
        app = page("slow")
        assert not app.button(key="approve-p1").disabled
        app.session_state["sent"] = {("slow", "p1"): "approve"}
        app.run()
        assert "approval sent, waiting for the controller" in text(app)
        assert app.button(key="approve-p1").disabled


def test_a_clock_that_was_set_back_turns_no_order_round(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = runs.slow(store)
    with monkeypatch.context() as clock:
        clock.setattr(control_stream, "time_ns", lambda: 10**18)
        writer.control(PlanRejected(proposal="p1", by="jon", reason="the night shift decides"))
    writer.close()
    assert data.snapshot("slow").state.proposals["p1"].status == "rejected"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["approve", "auto"])
def test_without_a_controller_nothing_can_be_decided_and_the_page_says_why(store: Store, mode: Mode) -> None:
    runs.slow(store, mode=mode).close()
    app = page("slow")
    assert "The controller is gone" in text(app)
    assert app.button(key="approve-p1").disabled
    assert app.button(key="mode").disabled
    assert "no living controller" in text(app)


@pytest.mark.slow
def test_after_a_death_the_rank_is_absent_and_its_work_shown_elsewhere(store: Store) -> None:
    runs.after_death(store).close()
    app = page("death")
    shown = text(app)
    assert "rank 6 · dead" in shown
    assert "9 rerouted in" in shown
    assert "answered by plan 2" in shown
    assert "Ranks 4, 5, 7 only waited for it: victims, not at fault." in shown
    assert re.search(r"−\d\.\d\d s per iteration \(−\d\.\d\d to −\d\.\d\d s\)", shown)
    assert {metric.label: metric.value for metric in app.metric}["Ranks"] == "7 of 8"


@pytest.mark.slow
@pytest.mark.parametrize("joins", [True, False])
def test_a_rank_that_came_back_is_not_shown_as_lost(store: Store, joins: bool) -> None:
    writer = runs.rejoined(store, joins=joins)
    with hold_controller_lock(store, "rejoined"):
        writer.close()
        app = page("rejoined")
    well = "Well: a lasting slowdown of any device by 15 % or more would have been named; 1 verdict before, no longer open."
    assert well in text(app)
    assert text(app).count("1 verdict before") == 1
    assert "dead</b>" not in text(app)
    metrics = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert metrics["Ranks"] == ("8 of 8", "all alive")


@pytest.mark.slow
def test_a_run_is_opened_from_its_address_and_an_unknown_one_falls_back_to_the_list(store: Store) -> None:
    runs.healthy(store, iterations=3).close()
    assert "controller is gone" in text(page("healthy"))
    app = page("nobody")
    assert app.selectbox(key="run").value is None
    assert "There is no run nobody in this store." in text(app)
    assert "Runs" in text(app)


def test_no_module_shadows_an_installed_one() -> None:
    """`streamlit run dashboard` puts the folder first on sys.path."""
    ours = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    installed = set(importlib.metadata.packages_distributions()) | set(sys.stdlib_module_names)
    assert not ours & installed


@pytest.mark.slow
def test_list_links_to_each_run_with_its_state(store: Store) -> None:
    runs.healthy(store, iterations=3).close()
    runs.after_death(store).close()
    shown = text(page())
    assert '<a href="?run=healthy"><b>healthy</b></a></td><td ><span class="u-chip u-bad">lost</span>' in shown
    assert '<a href="?run=death"><b>death</b></a></td><td ><span class="u-chip u-quiet">done</span>' in shown


@pytest.mark.slow
def test_what_the_log_lacks_and_what_is_wrong_in_it_is_said_on_both_pages(store: Store) -> None:
    writer = runs.healthy(store, iterations=12)
    with hold_controller_lock(store, "healthy"):
        writer.telemetry.append(Dropped(count=1234, types={"span": 1200, "heartbeat": 34}))
        writer.telemetry.append(Dropped(count=1))
        writer.close()
        publish(store, Manifest(number=1, problems=("run healthy: writer rank-0003.1 lacks 7 lines", "run other: no matter")))
        shown = text(page("healthy"))
        listed = text(page())
    dropped = "1,235 events were dropped unwritten (1,200 span, 34 heartbeat, 1 of unknown type)"
    assert f'u-bad">{dropped}</span>' in shown
    assert f"would have been named; {dropped}." in shown
    assert f'would have been named; {dropped}">' in listed
    assert "1 problem in the log: run healthy: writer rank-0003.1 lacks 7 lines" in shown
    assert "run other: no matter" in listed


@pytest.mark.slow
def test_devices_that_failed_in_several_runs_are_named_on_the_list(store: Store) -> None:
    for name in ("one", "two"):
        runs.slow(store, name).close()
    listed = text(page())
    assert "Devices with a history" in listed
    assert "2 of 2" in listed
    assert "slow device" in listed


def test_a_long_window_is_shown_several_iterations_to_a_column_that_sum_up_exactly(store: Store) -> None:
    runs.slow(store).close()
    one = data.judged("slow", 0, 39, 1)
    several = data.judged("slow", 0, 39, 7)
    assert several["iteration"].unique(maintain_order=True).to_list() == [
        first for first in range(0, 40, 7) if one.filter(pl.col("iteration").is_between(first, first + 6)).height
    ]
    expected = one.group_by((pl.col("iteration") // 7 * 7).alias("iteration"), "rank").agg(
        pl.col("measured_us", "reference_us", "iteration_us").sum()
    )
    assert several["x"].to_list() == (several["iteration"] // 7).to_list()
    assert_frame_equal(several.drop("x"), expected.sort("iteration", "rank"), check_dtypes=False)
