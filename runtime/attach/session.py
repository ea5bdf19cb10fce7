"""Unskew inside a rank of a foreign training loop: what `unskew.attach()` returns.

Nothing is written, and no thread started, before the loop's first `backward()`: a launcher, a loader's worker or an evaluation
that is attached as well costs nothing. An error of ours is told once on stderr and ends the measuring, never the loop. A forked
child of a rank that is measured is left alone.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.util import Finalize
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from unskew.collector.events import Heartbeat, PipelinePlace, RankAttached, RankDetached, Telemetry
from unskew.collector.files.loop_parts import LoopPart
from unskew.collector.paths import Store
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.attach.asked.probe_file import read_probe
from unskew.runtime.attach.clocks.coreless import CorelessClock
from unskew.runtime.attach.flights import last_flights
from unskew.runtime.attach.lengths import lengths_of
from unskew.runtime.attach.timeline import LoopTimeline

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from unskew.runtime.attach.balance import BalancedLoader
    from unskew.runtime.attach.notes import Report, VerdictNotes

BEAT_S = 0.5
REFUSED_BEATS = 3
"""A disk that has refused lines for so many beats is said to."""
FLUSH_S = 0.25
"""Each time a thread wakes the loop pays some 50 us."""
MOST_WAITING = 2_000
"""Iterations, or parts of long ones, in memory while the disk stalls; some 10 MB."""

LONGEST_FINISH_S = 5.0
"""At its end a loop waits so long for what its GPU has still to do."""
LEAST_STILL_S, STILL_FACTOR = 8.0, 10.0
"""Without progress for so long, and for so many of the longest pauses before, a rank writes down what its flight recorder has:
who hangs is then seen from who did not join."""
AT_FIRST = 100
"""Among what multiprocessing calls at the end of a process."""
MOST_ERROR, MOST_CAUSES = 400, 3
"""Characters of the exception that ended a loop; and how many are told, of those that it came of."""


class JobFacts(NamedTuple):
    """A process's place in its job; `groups`: the members of the process groups that are smaller than the job, `dimensions`: of
    each what its `DeviceMesh` calls it ("" = it has none); `unknown`: what cannot be judged, and why."""

    rank: int
    ranks: int
    groups: tuple[tuple[int, ...], ...]
    on_gpu: bool
    unknown: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = ()


class DeferredClock(Protocol):
    """A clock whose moments are known later (clocks/gpu.py)."""

    def now(self) -> int: ...
    def adopt(self) -> None: ...
    def waited(self, since_ns: int, until_ns: int) -> None: ...
    def take(self, part: LoopPart) -> None: ...
    def finish(self, timeout_s: float) -> None: ...


class _Step:
    """Of a loop that says it itself."""

    __slots__ = ("_session",)

    def __init__(self, session: LoopSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        if (loop := self._session.loop_or_begin()) is not None:
            self._session.guarded(loop.entered)

    def __exit__(self, error: object, *_: object) -> None:
        if error is None and (loop := self._session.loop()) is not None:
            self._session.guarded(loop.left)


def _in_words(error: BaseException | None) -> str:
    """What ended the loop, and what that came of: what a framework raises says less than torch did; "" = nothing did."""
    found: list[str] = []
    if isinstance(error, SystemExit):
        if not error.code:
            return ""
        error = error.__context__ or error  # torch.multiprocessing.spawn catches what it passes on
    while error is not None and len(found) < MOST_CAUSES:
        found.append(f"{type(error).__name__}: {str(error)[: MOST_ERROR // 2]}")
        error = error.__cause__ or error.__context__
    return ", after ".join(found)


def _peak_of_process() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


class LoopSession:
    """The measuring of one process. `facts` asks torch, once the loop has begun; `off`: what cannot be measured, a sentence
    each."""

    def __init__(self, store: Store, run: str, facts: Callable[[], JobFacts], off: tuple[str, ...] = ()) -> None:
        self.store, self.run, self.off = store, run, off
        self.problem = ""
        """Why the measuring has ended; "" while it goes on."""
        self.flights: Callable[[], tuple[bytes, dict[str, tuple[int, ...]]]] = lambda: (b"", {})
        """The process's flight recorder, as JSON, and the members of its groups."""
        self.product: Callable[[], object] = lambda: None
        """What a probe measures."""
        self.peak: Callable[[], int] = _peak_of_process
        """The most memory so far (bytes)."""
        self.gpu_clock: Callable[[Callable[[LoopPart], None]], DeferredClock] | None = None
        """Makes the clock of a loop on a GPU, of what takes its parts; None = the loop is not on one."""
        self.gpu = ""
        """Which one, by a name that no other has."""
        self.device: Any = None
        """Where the first `backward()` began, or the first stage of a pipeline is; None = nobody said."""
        self.clock: DeferredClock | None = None
        self.pipeline: PipelinePlace | None = None
        """Where the rank is in one."""
        self.timeline: LoopTimeline | None = None
        """What the moments of its thread go to; None where nothing is measured, and before the first `backward()`."""
        self.steps_on = 0
        """Before there is a `timeline`: the thread on which an optimizer steps, 0 = none. Lightning's loop is inside of it."""
        self._facts = facts
        self._measured, self._rank = True, 0
        self._spool: SpoolWriter | None = None
        self._ended = threading.Event()
        self._notes: list[VerdictNotes] = []
        self._noted: tuple[int | None, float | None] = None, None
        self._early: tuple[int, tuple[int, ...]] = 0, ()
        os.register_at_fork(after_in_child=self._forked)

    @property
    def active(self) -> bool:
        """Whether the process is measured, or will be from its first `backward()` on."""
        return self._measured

    # --- what the loop itself may say --------------------------------------------------------------------------------

    def note(self, *, tokens: int | None = None, loss: float | None = None) -> None:
        """Facts of the step in progress; they count instead of what was found in its tensors."""
        if self.timeline is None:  # the first step, before its `backward()`
            self._noted = tokens, loss
        elif (loop := self.loop()) is not None:
            loop.note(tokens, loss)

    def report(self, report: Report) -> None:
        """Call `report` with each verdict that `unskew watch` finds on this training, on a thread of ours (notes.py)."""
        from unskew.runtime.attach.notes import VerdictNotes  # noqa: PLC0415 - few ask for it

        self._notes.append(VerdictNotes(self.store, self.run, report))

    def balance(
        self,
        loader: DataLoader[Any],
        *,
        length: Sequence[int] | Callable[[Any], int] | None = None,
        mean_over: Literal["samples", "tokens"] = "samples",
        window: int = 8,
        model: object = None,
    ) -> BalancedLoader:
        """The loader, its samples divided among the ranks by the plan in force; iterate over it instead (docs/guide/act.md).

        `length`: tokens of a sample, by its index or as a function of it. `mean_over`: what the loss is the mean of. `window`:
        over so many global batches lengths may be balanced. `model`: the DDP model, which a rank may leave then. Every rank
        calls it, at the same place. Raises `ValueError` for a loader whose samples cannot be divided.
        """
        from unskew.runtime.attach.balance import BalancedLoader  # noqa: PLC0415 - it imports torch

        return BalancedLoader(self, loader, length=length, mean_over=mean_over, window=window, model=model)

    def step(self) -> AbstractContextManager[None]:
        """Around each step of a loop that has neither a loader nor an optimizer of torch: what it takes apart from `backward()`
        and from waits is its own time. One that ends with an exception is not over."""
        return _Step(self)

    def close(self) -> None:
        """Write what is left; the loop is not measured any more."""
        # Not the exception that is handled around this call, which may well end nobody.
        self._close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    def _close_at_end_of_process(self, handled: BaseException | None) -> None:
        """The same, called by multiprocessing while what ends the process goes through it; `handled`: what it was forked in."""
        error = sys.exc_info()[1]
        self.close() if error is None or error is handled else self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if (loop := self.loop()) is not None:
            try:
                loop.finish()
                if self.clock is not None:
                    self.clock.finish(LONGEST_FINISH_S)
            except Exception as problem:
                self.failed(problem)
        self._measured, self.timeline = False, None
        self._ended.set()
        self._report()
        if self._spool is not None:
            self._spool.append(RankDetached(rank=self._rank, pid=os.getpid(), error=_in_words(error)[:MOST_ERROR]))
            self._spool.close()
            self._spool = None

    # --- for the seams -----------------------------------------------------------------------------------------------

    def loop(self) -> LoopTimeline | None:
        """`timeline` on its threads (the loop's, and that on which autograd goes through a GPU's graph meanwhile), None on
        others. The seams that each micro-batch passes ask for the loop's themselves."""
        return (
            loop if (loop := self.timeline) is not None and ((me := get_ident()) == loop.thread or me == loop.engine) else None
        )

    def loop_or_begin(self) -> LoopTimeline | None:
        """The same, and now is the first `backward()`; before it nobody knows which thread is measured."""
        if self.timeline is None and self._measured:
            try:
                self.timeline = self._begin()
            except Exception as error:
                self.failed(error)
        return self.loop()

    def guarded(self, report: Callable[[], object]) -> None:
        """Report a moment; an error of ours, or one of the GPU's that an event comes upon, is none of the loop's."""
        try:
            report()
        except Exception as error:
            self.failed(error)

    def loaded_early(self, batch: object) -> None:
        """A loader's batch before the first `backward()`, which may be of it."""
        if self._measured:
            self._early = get_ident(), lengths_of(batch)

    def emit(self, event: Telemetry) -> None:
        """Into the rank's log; nothing where nothing is measured."""
        if self._spool is not None and self._measured:
            self._spool.append(event)

    def flush(self, timeout_s: float) -> bool:
        """Whether all that was measured so far is with the kernel; waits for it, and before for a GPU, at most so long each."""
        if self.clock is not None:
            self.clock.finish(timeout_s)
        return self._spool is None or self._spool.hand_over(timeout_s)

    def lacks(self, missing: tuple[str, ...]) -> None:
        """What cannot be measured, a sentence each, more than was known before."""
        self.off = (*self.off, *missing)

    def failed(self, error: Exception) -> None:
        """End the measuring, and the heartbeats: nobody could tell a rank that is not measured from one that hangs."""
        self._measured, self.timeline, self.problem = False, None, f"{type(error).__name__}: {error}"
        self._ended.set()
        with suppress(Exception):
            if self._spool is not None:
                self._spool.append(RankDetached(rank=self._rank, pid=os.getpid(), unmeasured=self.problem[:MOST_ERROR]))
            print(f"unskew: this rank is not measured any more, training goes on: {self.problem}", file=sys.stderr)

    def _begin(self) -> LoopTimeline:
        """The first backward pass: now the process is a rank, and torch knows which."""
        facts, node, pid = self._facts(), socket.gethostname(), os.getpid()
        spool = SpoolWriter(self.store, self.run, f"rank-{facts.rank:04d}.{pid}", capacity=MOST_WAITING, flush_s=FLUSH_S)
        spool.append(
            RankAttached(
                rank=facts.rank,
                ranks=facts.ranks,
                node=node,
                pid=pid,
                on_gpu=facts.on_gpu,
                gpu=self.gpu,
                groups=facts.groups,
                dimensions=facts.dimensions,
                pipeline=self.pipeline,
                off=(*self.off, *facts.unknown),
            )
        )
        spool.flush_soon()  # a rank that dies at once is known then
        self._spool, self._rank = spool, facts.rank
        device, product = f"{node}:{facts.rank}", self.product
        if self.gpu_clock is None:
            ready = CorelessClock().read
            timeline = LoopTimeline(facts.rank, facts.ranks, device, spool.append, ready=ready, product=product)
        else:
            clock = self.clock = self.gpu_clock(spool.append)
            timeline = LoopTimeline(
                facts.rank, facts.ranks, device, clock.take, ready=lambda: 0, product=product, now=clock.now, waits=clock.waited
            )
        timeline.note(*self._noted)
        if facts.ranks == 1 and self._early[0] == timeline.thread:  # of several, models show what they are given from now on
            timeline.began_with(self._early[1])
        if self.steps_on == timeline.thread:
            timeline.stepping()
        beat = threading.Thread(target=self._beat, args=(timeline, spool, pid), name="unskew-beat", daemon=True)
        beat.start()
        atexit.register(self.close)
        if multiprocessing.parent_process() is not None:
            # A forked one calls nothing else at its end, and in any what ends it is known only while this is called.
            Finalize(None, self._close_at_end_of_process, (sys.exc_info()[1],), exitpriority=AT_FIRST)
        return timeline

    def _beat(self, timeline: LoopTimeline, spool: SpoolWriter, pid: int) -> None:
        """Now and then: how far the rank is, also while it hangs."""
        progress, still_s, longest_s, written = -1, 0.0, 0.0, False
        probed, refused = read_probe(self.store, self.run), 0
        while not self._ended.wait(BEAT_S):
            if timeline.progress != progress:
                longest_s, still_s, written = max(longest_s, still_s), 0.0, False
            else:
                still_s += BEAT_S
            progress = timeline.progress
            self._report()
            refused = refused + 1 if spool.problem else 0
            if refused == REFUSED_BEATS and os.environ.get("LOCAL_RANK", "0") == "0":  # one of a machine says it
                sentence = "takes no lines now, what does not fit is dropped, training goes on"
                print(f"unskew: {str(self.store.root)!r} {sentence}: {spool.problem}", file=sys.stderr)
            if (asked := read_probe(self.store, self.run)) > probed:
                probed, timeline.probe_due = asked, True
            if not written and still_s >= max(LEAST_STILL_S, STILL_FACTOR * longest_s):
                written = True
                with suppress(Exception):
                    for event in last_flights(*self.flights(), timeline.rank):
                        spool.append(event)
            spool.append(
                Heartbeat(
                    rank=timeline.rank,
                    pid=pid,
                    iteration=timeline.iteration,
                    progress=progress,
                    activity=timeline.activity,
                    age_us=0,
                    stalled_us=round(1e6 * still_s),
                    peak_bytes=self.peak(),
                )
            )

    def _report(self) -> None:
        """Report what is judged to who asked for it; one that fails is not called again."""
        for notes in self._notes:
            try:
                notes.look()
            except Exception as problem:
                self._notes = [one for one in self._notes if one is not notes]
                with suppress(Exception):
                    print(f"unskew: verdicts are not noted any more: {type(problem).__name__}: {problem}", file=sys.stderr)

    def _forked(self) -> None:
        """The child of a rank that is measured is none; that of a process that may become one may become one as well."""
        self._measured = self._measured and self._spool is None
        self.timeline = self._spool = self.clock = None
