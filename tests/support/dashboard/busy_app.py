"""The dashboard as a machine shows it that is too busy to draw a page within a tick: the next redrawing is always due."""

from __future__ import annotations

import runpy
import time
from types import SimpleNamespace

from support.dashboard.pages import FOLDER

from unskew.dashboard import run_page
from unskew.dashboard.data import Snapshot
from unskew.dashboard.panels import kpis


def late(snapshot: Snapshot) -> None:
    time.sleep(1.2 * run_page.TICK_S)
    kpis.show(snapshot)


run_page.kpis = SimpleNamespace(show=late)
runpy.run_path(str(FOLDER / "streamlit_app.py"))
