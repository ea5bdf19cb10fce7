"""The acting half of a watched training: what people decide comes in, plans for its ranks and verdicts for others go out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from unskew.analytics.actuators import acting
from unskew.analytics.core.iteration import CommittedIteration, IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.loop.watched.attached_rules import AttachedState
from unskew.collector.alerts.delivery import deliver
from unskew.collector.alerts.rules import Rule
from unskew.collector.events import Event, Mode, Span, Verdict
from unskew.collector.paths import Store, StoreError
from unskew.collector.write.commands import Inbox
from unskew.runtime.attach.asked.plan_file import PlanForRanks, write_plan
from unskew.runtime.attach.asked.probing import JobProbing

Log = Callable[..., None]


class ActOptions(msgspec.Struct, frozen=True):
    """Who decides what is done, and what replaces a slow device: a command, or the address of a webhook. Both are given where
    the training is started, and by no store."""

    mode: Mode = "observe"
    replace: Rule | None = None


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """What is handed on, as JSON."""

    run: str
    proposal: str
    rank: int | None
    node: str
    pid: int
    verdict: Verdict


class JobActing:
    """Of one run. `log` takes events, and who decided them; `place_of` says where a rank runs: node, pid."""

    def __init__(
        self,
        store: Store,
        run: str,
        plan: Plan,
        options: ActOptions,
        *,
        log: Log,
        place_of: Callable[[int], tuple[str, int]],
        on_gpu: bool = False,
    ) -> None:
        self._store, self._run, self._options, self._log, self._place_of = store, run, options, log, place_of
        target = options.replace.target if options.replace is not None else ""
        self._state = acting.begin(plan, options.mode, target)
        self.plans = {plan.plan_version: plan}
        """Those that ranks may follow."""
        self._inbox = Inbox(store, run)
        self._probing = JobProbing(store, run, on_gpu=on_gpu)
        self._handed: list[tuple[acting.HandOver, str]] = []

    def look(self, iteration: int) -> None:
        """What people ask, and what became of what was handed on."""
        commands, refused = self._inbox.poll()
        if refused:
            self._log(refused)
        for command in (one for one in commands if one.kind == "probe"):
            self._log((self._probing.ask(command, self._state.plan.ranks),), command.by)
        self._log(self._probing.look(iteration))
        if commands := [one for one in commands if one.kind != "probe"]:
            (self._state, events, orders), actors = acting.commanded(self._state, commands, iteration)
            for event, actor in zip(events, actors, strict=True):
                self._log((event,), actor)
            self._carry_out(orders)
        while self._handed:
            self._state, events = acting.handed(self._state, *self._handed.pop(0), iteration)
            self._log(events)

    def entered(self, committed: CommittedIteration) -> Plan | None:
        """The plan that the ranks follow from this iteration on, where it is another."""
        self._state, events = acting.entered(self._state, committed.plan_version, committed.iteration)
        self._log(events)
        return self._state.plan if events else None

    def committed(
        self, released: IterationTelemetry, seen: AttachedState, found: Sequence[Event], offered: Sequence[Event]
    ) -> None:
        """An iteration was judged; meanwhile ranks said what their loops offer."""
        for event in offered:
            self._state = acting.heard(self._state, event)
        self._state, events, orders = acting.committed(self._state, released, seen, found)
        self._log(events)
        self._carry_out(orders)

    def probed(self, span: Span) -> None:
        """A rank has measured itself."""
        self._probing.measured(span)

    def finish(self, iteration: int) -> list[Event]:
        """What is to be logged at the end."""
        return [*self._probing.look(iteration, ended=True), *acting.finished(self._state)]

    def _carry_out(self, orders: Sequence[acting.Order]) -> None:
        for order in orders:
            if isinstance(order, acting.HandOver):
                threading.Thread(target=self._hand_on, args=(order,), name="replace", daemon=True).start()
                continue
            assert order.plan.division is not None
            self.plans[order.plan.plan_version] = order.plan
            try:
                write_plan(self._store, self._run, PlanForRanks(order.plan.plan_version, order.plan.division))
            except (OSError, StoreError) as error:
                self._state, events = acting.failed(self._state, f"the plan could not be written for the ranks: {error}")
                self._log(events)

    def _hand_on(self, order: acting.HandOver) -> None:
        assert self._options.replace is not None
        rank = order.verdict.culprits[0].rank
        node, pid = self._place_of(rank or 0)
        message = Replacement(run=self._run, proposal=order.proposal, rank=rank, node=node, pid=pid, verdict=order.verdict)
        result = deliver(self._options.replace, message)
        self._handed.append((order, "" if result.ok else result.detail or "it failed"))
