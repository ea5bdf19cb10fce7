"""The state of a run in a word, the same in the list and on its page."""

from __future__ import annotations

from unskew.analytics.core.outcome import OutcomeWord
from unskew.analytics.core.run_state import RunState
from unskew.dashboard.theme import Tone

NO_NEWS_S = 10.0
"""A run that goes on is called silent when nothing was heard of it for so long."""

TONES: dict[str, Tone] = {
    "running": "ok",
    "silent": "warn",
    "lost": "bad",
    "done": "quiet",
    "stopped": "quiet",
    "failed": "bad",
    "incomplete": "bad",
}

OUTCOME_TONES: dict[OutcomeWord, Tone] = {"wrong": "warn", "well": "ok", "cannot_be_judged": "quiet"}
OUTCOME_WORDS: dict[OutcomeWord, str] = {"wrong": "wrong", "well": "well", "cannot_be_judged": "cannot be judged"}


def imported(state: RunState) -> bool:
    """Whether the run is another tool's, brought in: nobody predicted, judged or planned here."""
    return state.started is not None and state.started.clock == "imported"


def simulated(state: RunState) -> bool:
    """Whether the run was played by the simulator, which times iterations and no chunks."""
    return state.started is not None and state.started.device == "simulated"


def status_of(status: str | None, controlled: bool, age_s: float) -> str:
    """A key of `TONES`. `status` is that of the run's last word, None without one; lost = no controller and no last word."""
    if status is not None:
        return status
    if not controlled:
        return "lost"
    return "silent" if age_s > NO_NEWS_S else "running"
