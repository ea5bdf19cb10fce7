"""The page in a real browser: it follows a growing log by itself, and a decision made on it reaches the run's inbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from support.dashboard import runs
from support.dashboard.browser import approve_first_proposal, headline, open_browser, proposal_state, serve_dashboard, wait_for

from unskew.collector.events import PlanApproved
from unskew.collector.paths import Store
from unskew.collector.write.commands import Inbox, hold_controller_lock

pytestmark = pytest.mark.slow


def figure(driver: WebDriver, label: str) -> str:
    """The value of the metric with this label."""
    for metric in driver.find_elements(By.CSS_SELECTOR, "[data-testid=stMetric]"):
        name, value = metric.text.splitlines()[:2]
        if name == label:
            return value
    raise AssertionError(f"no metric {label}")


@pytest.mark.limit(180)
def test_page_follows_the_log_and_sends_an_approval(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    writer = runs.slow(store)
    with (
        hold_controller_lock(store, "slow"),
        open_browser(tmp_path / "profile") as driver,
        serve_dashboard(store) as address,
    ):
        driver.get(f"{address}/?run=slow")

        def culprit() -> str | None:
            shown = headline(driver)
            if shown.startswith("Nothing has been heard"):  # a browser that starts slowly finds a run that was silent
                writer.train(1)
            return shown if shown.startswith("Rank 3 runs at 0.55") else None

        wait_for(culprit, 60, "the page does not name rank 3")
        wait_for(lambda: len(driver.find_elements(By.CSS_SELECTOR, "canvas")) >= 3 or None, 60, "no charts")

        def caught_up() -> bool | None:
            return figure(driver, "Iterations") == str(writer.iteration) or None

        wait_for(caught_up, 20, "the page does not show the log")
        writer.train(3)
        wait_for(caught_up, 20, "the page did not follow the log")

        approve_first_proposal(driver, "mira", "hours to go")
        inbox = Inbox(store, "slow")
        (command,) = wait_for(lambda: inbox.poll()[0] or None, 60, "no command came")
        assert (command.kind, command.target, command.by, command.reason) == ("approve", "p1", "mira", "hours to go")
        assert proposal_state(driver) == "open"

        writer.control(PlanApproved(proposal="p1", by=command.by, reason=command.reason), actor=command.by)
        writer.apply(runs.repartitioned(1), "p1", "rank 3 is slow")
        writer.train(2)
        wait_for(lambda: proposal_state(driver) == "applied" or None, 20, "the page does not show that the plan is applied")
        plan = driver.find_element(By.CSS_SELECTOR, ".st-key-card-plan").text
        assert "Plan 1: who holds what" in plan
        assert "was 4 layers, 8 mb" in plan

        hosts = driver.execute_script("return performance.getEntriesByType('resource').map(e => new URL(e.name).hostname)")
        assert set(hosts) <= {"127.0.0.1", ""}
    writer.close()
