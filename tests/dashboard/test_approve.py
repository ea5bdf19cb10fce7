"""A person approves, in a real browser, a proposal of a job that is running, and sees the plan change."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from support.dashboard.browser import (
    BUSY_DASHBOARD,
    approve_first_proposal,
    open_browser,
    proposal_state,
    serve_dashboard,
    wait_for,
)
from support.processes import send_signal
from support.training.warm_processes import warm_process

from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import controller_alive

pytestmark = pytest.mark.slow

JOB = (
    "--pp 2 --dp 2 --layers 8 --dim 16 --heads 1 --micro-batches 8 --iterations 150 --device sleep --mode approve "
    "--fault slow:rank=1,factor=2,at=10"
)


@pytest.mark.limit(150)
def test_a_proposal_approved_in_the_browser_changes_the_plan_of_the_running_job(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with open_browser(tmp_path / "profile") as driver:
        job = warm_process().start_command("run", *JOB.split(), "--no-dashboard", "--store", str(store.root))
        try:
            with serve_dashboard(store, BUSY_DASHBOARD) as address:
                run = wait_for(lambda: started(store), 60, "the job does not start")
                driver.get(f"{address}/?run={run}")
                wait_for(lambda: proposal_state(driver) == "open" or None, 90, "no proposal comes up")
                assert "of its healthy speed" in driver.find_element(By.CSS_SELECTOR, "[data-testid=headline]").text
                assert plan_title(driver.page_source) == 0
                approve_first_proposal(driver, "ada", "rank 1 is slow")
                wait_for(lambda: proposal_state(driver) in ("applied", "scored") or None, 30, "the change is not applied")
                wait_for(lambda: plan_title(driver.page_source) == 1 or None, 10, "the page does not show the new plan")
                assert controller_alive(store, run), "the job ended before the plan changed: nothing was proved"
        finally:
            send_signal(job.pid, signal.SIGTERM)
            job.wait(30)
    with open_store(store) as log:
        by = log.sql("select \"by\" from decisions where decision = 'approved'")["by"].to_list()
        layers = log.sql("select sum(n_layers) / count(*) as n from chunks where rank = 1 group by epoch order by epoch")["n"]
    assert by == ["ada"]
    assert layers[1] < layers[0], "the slow rank was to get fewer layers"


def started(store: Store) -> str | None:
    """The run's name, once it has begun."""
    with open_store(store) as log:
        return next(iter(log.runs()["run"].to_list()), None)


def plan_title(page: str) -> int | None:
    """The number of the plan that the page shows as being in force."""
    return next((plan_version for plan_version in range(9) if f"Plan {plan_version}: who holds what" in page), None)
