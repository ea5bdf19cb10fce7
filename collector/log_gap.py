"""What the log of a run lacks, by its own word: what its last words miss, and what its writers had to drop."""

from __future__ import annotations

from collections.abc import Mapping

from unskew.collector.events import Dropped, RunFinished, RunStarted


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
    found += [f"{_events(finished.unwritten)} could not be written"] * (finished.unwritten > 0)
    return ", ".join(found)


def with_dropped(dropped: Mapping[str, int], event: Dropped) -> dict[str, int]:
    """Type -> how many were dropped, with one more line's; "" = of which type is not known.

    >>> with_dropped({"span": 5}, Dropped(count=7, types={"span": 4, "heartbeat": 3}))
    {'span': 9, 'heartbeat': 3}
    """
    more = event.types or {"": event.count}
    return {name: dropped.get(name, 0) + more.get(name, 0) for name in [*dropped, *more]}


def dropped_sentence(dropped: Mapping[str, int]) -> str:
    """How many events of which types, without a full stop; "" where there were none.

    >>> dropped_sentence({"span": 1200, "heartbeat": 34})
    '1,234 events were dropped unwritten (1,200 span, 34 heartbeat)'
    """
    most_first = sorted(dropped.items(), key=lambda one: -one[1])
    types = ", ".join(f"{n:,} {name or 'of unknown type'}" for name, n in most_first)
    n = sum(dropped.values())
    return f"{_events(n)} {'was' if n == 1 else 'were'} dropped unwritten ({types})" if n else ""


def _events(n: int) -> str:
    return f"{n:,} event{'' if n == 1 else 's'}"
