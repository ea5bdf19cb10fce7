"""A real browser on a real dashboard: what the browser tests share. Elements are found anew at each poll, because live parts
of the page are redrawn every second."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException, WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from support.dashboard.pages import FOLDER

from unskew.collector.paths import Store

T = TypeVar("T")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1440,1400",
)  # fmt: skip
BUSY_DASHBOARD = Path(__file__).with_name("busy_app.py")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def serve_dashboard(store: Store, app: Path = FOLDER) -> Iterator[str]:
    """`streamlit run` of `app` on a free local port; gives its address and ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"UNSKEW_STORE": str(store.root)}, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _healthy(address) or None, 60, "the dashboard does not answer")
        yield address
    finally:
        process.terminate()
        process.wait(10)


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/_stcore/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def open_browser(profile: Path) -> Iterator[WebDriver]:
    """A headless browser with an empty profile in `profile`; skips the test, naming what is missing."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    driver_path = shutil.which("chromedriver")
    if browser is None or driver_path is None:
        pytest.skip(f"{'chromium' if browser is None else 'chromedriver (chromium-driver)'} is not installed")
    options = Options()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        yield driver
    finally:
        driver.quit()


def wait_for(look: Callable[[], T | None], timeout_s: float, complaint: str) -> T:
    """What `look` returns once it is not None; elements that are redrawn meanwhile are looked for again."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if (found := look()) is not None:
                return found
        except (NoSuchElementException, StaleElementReferenceException, WebDriverException):
            pass
        time.sleep(0.2)
    raise AssertionError(f"{complaint} (waited {timeout_s:g} s)")


def headline(driver: WebDriver) -> str:
    """The sentence on top of the page."""
    return driver.find_element(By.CSS_SELECTOR, "[data-testid=headline] .u-sentence").text


def proposal_state(driver: WebDriver) -> str:
    """How far the shown proposal came: open, approved, applied, scored, rejected, expired or failed."""
    return driver.find_element(By.CSS_SELECTOR, "[data-testid=proposal]").get_attribute("data-state") or ""


def approve_first_proposal(driver: WebDriver, by: str, reason: str, *, timeout_s: float = 60) -> None:
    """Press Approve on the first open proposal of the run page, give name and reason, and send."""
    _press(driver, "[class*=st-key-approve-] button:not([disabled])", timeout_s)
    _type(driver, ".st-key-by-approve input", by, timeout_s)
    _type(driver, ".st-key-reason-approve textarea", reason, timeout_s)
    _send(driver, ".st-key-send-approve button", timeout_s)


def _send(driver: WebDriver, selector: str, timeout_s: float) -> None:
    """Press once and see the dialog end: no press is lost, however busy the page."""
    _press(driver, selector, timeout_s)
    wait_for(
        lambda: None if driver.find_elements(By.CSS_SELECTOR, selector) else True,
        timeout_s,
        f"pressing {selector} does not end the dialog",
    )


def _press(driver: WebDriver, selector: str, timeout_s: float) -> None:
    def press() -> bool:
        driver.find_element(By.CSS_SELECTOR, selector).click()
        return True

    wait_for(press, timeout_s, f"nothing to press at {selector}")


def _type(driver: WebDriver, selector: str, text: str, timeout_s: float) -> None:
    def write() -> bool | None:
        field = driver.find_element(By.CSS_SELECTOR, selector)
        if field.get_attribute("value") != text:
            field.clear()
            field.send_keys(text)
        return True if field.get_attribute("value") == text else None

    wait_for(write, timeout_s, f"cannot write into {selector}")
