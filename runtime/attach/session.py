"""Unskew inside a rank of a foreign training loop: what `unskew.attach()` returns.

Nothing is written, and no thread started, before the loop's first `backward()`: a launcher, a loader's worker or an evaluation
that is attached as well costs nothing. An error of ours is told once on stderr and ends the measuring, never the loop. A forked
child of a rank that is measured is left alone.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from unskew.collector.events import Heartbeat, RankAttached, RankDetached
from unskew.collector.paths import Store
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.attach.clock import ThreadClock
from unskew.runtime.attach.timeline import LoopTimeline, Moment

BEAT_S = 0.5
MOST_WAITING = 20_000
"""Events in memory while the disk stalls; some 10 MB."""

MOST_ERROR = 400
"""Characters of the exception that ended a loop."""

P = ParamSpec("P")
R = TypeVar("R")


class JobFacts(NamedTuple):
    """A process's place in its job; `groups`: the members of the process groups that are smaller than the job; `unknown`: what
    cannot be judged, and why."""

    rank: int
    ranks: int
    groups: tuple[tuple[int, ...], ...]
    on_gpu: bool
    unknown: tuple[str, ...] = ()


def harmless(method: Callable[Concatenate[LoopSession, P], R]) -> Callable[Concatenate[LoopSession, P], R | None]:
    """Does nothing where the session does not measure, and raises nothing."""

    @wraps(method)
    def call(session: LoopSession, /, *arguments: P.args, **named: P.kwargs) -> R | None:
        if not session.active:
            return None
        try:
            return method(session, *arguments, **named)
        except Exception as error:
            session.failed(error)
            return None

    return call


class LoopSession:
    """The measuring of one process. `facts` asks torch, once the loop has begun; `off`: what cannot be measured, a sentence
    each."""

    def __init__(self, store: Store, run: str, facts: Callable[[], JobFacts], off: tuple[str, ...] = ()) -> None:
        self.store, self.run, self.off = store, run, off
        self.problem = ""
        """Why the measuring has ended; "" while it goes on."""
        self._facts = facts
        self._measured, self._thread = True, 0
        self._timeline: LoopTimeline | None = None
        self._spool: SpoolWriter | None = None
        self._ended = threading.Event()
        os.register_at_fork(after_in_child=self._forked)

    @property
    def active(self) -> bool:
        """Whether this thread of this process is measured; before the first `backward()` nobody knows which will be."""
        return self._measured and self._thread in {0, threading.get_ident()}

    # --- what the loop itself may say --------------------------------------------------------------------------------

    @harmless
    def note(self, *, tokens: int | None = None, loss: float | None = None) -> None:
        """Facts of the step in progress; they count instead of what was found in its tensors."""
        if self._timeline is not None:
            self._timeline.note(tokens, loss)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step of a loop that has neither a loader nor an optimizer of torch: what it takes apart from `backward()`
        and from waits is its own time. One that ends with an exception is not over."""
        self._entered()
        yield
        self._left()

    def close(self) -> None:
        """Write what is left; the loop is not measured any more."""
        self._finish()
        self._measured = False
        self._ended.set()
        if self._spool is not None and self._timeline is not None:
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            text = f"{type(error).__name__}: {error}"[:MOST_ERROR] if error is not None else ""
            self._spool.append(RankDetached(rank=self._timeline.rank, pid=os.getpid(), error=text))
            self._spool.close()
            self._spool = None

    # --- what seams report -------------------------------------------------------------------------------------------

    @harmless
    def loading(self) -> Moment | None:
        return None if self._timeline is None else self._timeline.loading()

    @harmless
    def loaded(self, since: Moment | None, batch: Any) -> None:
        if self._timeline is not None and since is not None:
            self._timeline.loaded(since, batch)

    @harmless
    def called(self, batch: Any) -> None:
        if self._timeline is not None:
            self._timeline.called(batch)

    @harmless
    def backward(self, loss: float | None) -> None:
        if self._timeline is None:
            self._timeline = self._begin()
        self._timeline.backward(loss)

    @harmless
    def computed(self) -> None:
        if self._timeline is not None:
            self._timeline.computed()

    @harmless
    def returned(self) -> None:
        if self._timeline is not None:
            self._timeline.returned()

    @harmless
    def stepping(self) -> None:
        if self._timeline is not None:
            self._timeline.stepping()

    @harmless
    def stepped(self) -> None:
        if self._timeline is not None:
            self._timeline.stepped()

    @harmless
    def _entered(self) -> None:
        if self._timeline is None:
            self._timeline = self._begin()
        self._timeline.entered()

    @harmless
    def _left(self) -> None:
        if self._timeline is not None:
            self._timeline.left()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for other ranks."""
        before = self._waits()
        try:
            yield
        finally:
            self._waited(before)

    @harmless
    def _waits(self) -> tuple[int, str] | None:
        return None if self._timeline is None else self._timeline.wait()

    @harmless
    def _waited(self, before: tuple[int, str] | None) -> None:
        if self._timeline is not None and before is not None:
            self._timeline.waited(*before)

    @harmless
    def _finish(self) -> None:
        if self._timeline is not None:
            self._timeline.finish()

    # -----------------------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """End the measuring."""
        self._measured, self.problem = False, f"{type(error).__name__}: {error}"
        with suppress(Exception):
            print(f"unskew: this rank is not measured any more, training goes on: {self.problem}", file=sys.stderr)

    def _begin(self) -> LoopTimeline:
        """The first backward pass: now the process is a rank, and torch knows which."""
        facts, self._thread, node, pid = self._facts(), threading.get_ident(), socket.gethostname(), os.getpid()
        spool = SpoolWriter(self.store, self.run, f"rank-{facts.rank:04d}.{pid}", capacity=MOST_WAITING)
        spool.append(
            RankAttached(
                rank=facts.rank,
                ranks=facts.ranks,
                node=node,
                pid=pid,
                on_gpu=facts.on_gpu,
                groups=facts.groups,
                off=(*self.off, *facts.unknown),
            )
        )
        self._spool = spool
        timeline = LoopTimeline(facts.rank, facts.ranks, f"{node}:{facts.rank}", ThreadClock().read, spool.append)
        beat = threading.Thread(target=self._beat, args=(timeline, spool, pid), name="unskew-beat", daemon=True)
        beat.start()
        atexit.register(self.close)
        return timeline

    def _beat(self, timeline: LoopTimeline, spool: SpoolWriter, pid: int) -> None:
        """Now and then: how far the rank is, also while it hangs."""
        progress, still_s = -1, 0.0
        while not self._ended.wait(BEAT_S):
            still_s = 0.0 if timeline.progress != progress else still_s + BEAT_S
            progress = timeline.progress
            spool.append(
                Heartbeat(
                    rank=timeline.rank,
                    pid=pid,
                    iteration=timeline.iteration,
                    progress=progress,
                    activity=timeline.activity,
                    age_us=0,
                    stalled_us=round(1e6 * still_s),
                )
            )

    def _forked(self) -> None:
        """The child of a rank that is measured is none; that of a process that may become one may become one as well."""
        self._measured = self._measured and self._spool is None
        self._timeline = self._spool = None
