"""The process that evaluates a store's alerts: beside the collector, which starts it when the store has a rules file.

It asks every PERIOD_S, reads the rules again when their file changes, and ends when nobody collects any more.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from unskew.collector.alerts.acceptance import accepted_file, load_accepted, waits
from unskew.collector.alerts.evaluation import Alerting, AlertTransition
from unskew.collector.alerts.rules import Rule, load_rules, rules_file
from unskew.collector.background import lower_priority, lower_session, start_in_background
from unskew.collector.locks import is_held
from unskew.collector.paths import Store, StoreError
from unskew.collector.process_log import report

PERIOD_S = 2.0


def start_alerts(store: Store) -> int | None:
    """Start the process, unless the store has no accepted rules or one is at it; its pid. The caller reaps it."""
    if not rules_file(store).exists() or waits(store) or is_held(store.lock("alerts")):
        return None
    return start_in_background(store, "unskew.collector.alerts.process", "alerts.log")


def serve(
    store: Store,
    rules: Path,
    *,
    over: Callable[[], bool],
    load: Callable[[Path], tuple[Rule, ...]] = load_rules,
    show: Callable[[AlertTransition], None] = lambda _: None,
    period_s: float = PERIOD_S,
) -> None:
    """Evaluate until SIGTERM, SIGINT, or until `over` is true after an evaluation; `show` gets each change.

    A rules file that became wrong is reported on stderr, and its last right form stays in force. Raises `StoreError`.
    """
    ending = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # taken by sigtimedwait alone, so that no step is cut
    read, alerting = _read_at(rules), Alerting(store, load(rules))
    try:
        reported = ""
        while True:
            try:
                for change in alerting.step(time.time_ns() // 1000):
                    show(change)
                reported = ""
            except (
                StoreError
            ) as error:  # a full disk, say: what was not logged was not told either, and comes with a later step
                if over():
                    raise
                if str(error) != reported:
                    report(f"alerts: {error}")
                reported = str(error)
            if over() or signal.sigtimedwait(ending, period_s) is not None:
                return
            if _read_at(rules) != read:
                read = _read_at(rules)
                try:
                    alerting.use(load(rules))
                except StoreError as error:
                    report(f"alerts: {error}")
    finally:
        alerting.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read_at(rules: Path) -> tuple[int, int]:
    """When the rules, and what is accepted, were written last."""
    return _mtime(rules), _mtime(accepted_file())


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m unskew.collector.alerts.process", description="The alerts of one store.")
    parser.add_argument("--store", required=True, help="folder of the store")
    store = Store.locate(parser.parse_args(arguments).store)
    lower_priority()
    lower_session()
    try:
        serve(store, rules_file(store), load=load_accepted, over=lambda: not is_held(store.lock("collector")))
    except StoreError as error:
        report(f"alerts: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
