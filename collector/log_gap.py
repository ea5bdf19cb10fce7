"""What the log of a run that is over lacks, by what the run's own last words say."""

from __future__ import annotations

from unskew.collector.events import RunFinished, RunStarted


def log_gap(started: RunStarted | None, finished: RunFinished | None) -> str:
    """One sentence, without its full stop; "" when the log holds all that was trained, or nothing shows what that was.

    A run of a version whose ranks did not report is held against what was asked for, once it says that it is done.
    """
    if finished is None:
        return ""
    committed = finished.committed
    if committed is None and finished.status == "done" and started is not None and started.device_kind is not None:
        committed = started.options.get("iterations")
    missing = (committed or 0) - finished.iterations
    found = [f"the log holds {finished.iterations} of the {committed} iterations that were committed"] * (missing > 0)
    found += [f"{finished.unwritten:,} events could not be written"] * (finished.unwritten > 0)
    return ", ".join(found)
