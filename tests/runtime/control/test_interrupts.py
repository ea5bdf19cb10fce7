"""Signals that end a run wait for a safe point of its controller."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from unskew.commands.common import as_ctrl_c
from unskew.runtime.control.interrupts import Interrupts


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may be run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_ends_a_run_waits_for_a_safe_point(number: signal.Signals) -> None:
    as_ctrl_c()
    with Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    as_ctrl_c()
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGHUP)
        interrupts.check()
    signal.raise_signal(signal.SIGHUP)
