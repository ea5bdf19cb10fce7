"""What a rank of a foreign loop did, out of the moments that its seams report: spans, lengths, committed iterations.

An iteration begins where the last one's optimizer step ended and ends with its own; it counts as committed when the next one
begins (a loop may step several optimizers). Of each piece of work the own time is the wall clock without waiting in
collectives and without time that the thread had no core.

A micro-batch is the loop's path from a batch in hand to the end of `backward()`: F from the batch to the call, B from the call
until the rank's last gradient, then, as an all-reduce, until the call returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from unskew.collector.events import IterationCommitted, MicroBatchPacked, Span, SpanKind, Telemetry
from unskew.runtime.attach.lengths import lengths_of

LEAST_WAIT_US = 20
"""A shorter tail of `backward()` is no collective."""
MOST_NAMED = 64
"""Members of larger groups are not spelled out in the group's name."""


class Moment(NamedTuple):
    """`ready_ns`: without a core so far; `waited_ns`: in collectives so far."""

    ns: int
    ready_ns: int
    waited_ns: int


class LoopTimeline:
    """Of one rank. `clock` is `ThreadClock.read`, `emit` takes the events; every method is a few microseconds."""

    def __init__(
        self, rank: int, ranks: int, device: str, clock: Callable[[], tuple[int, int]], emit: Callable[[Telemetry], None]
    ) -> None:
        self.rank, self.ranks, self._device, self._clock, self._emit = rank, ranks, device, clock, emit
        self._group = "-".join(map(str, range(ranks))) if ranks <= MOST_NAMED else "world"
        self.iteration = self.micro_batches = self.progress = 0
        self.activity = "idle"
        self._waited_ns = 0
        self._begun = self._mark = self._now()
        self._lengths: tuple[int, ...] = ()
        self._shown: tuple[int, ...] = ()
        self._losses: list[float] = []
        self._tokens = 0
        self._noted_loss: float | None = None
        self._noted_tokens: int | None = None
        self._stepped = False
        self._named_us = self._named_own_us = self._named_waited_us = self._named_ready_us = 0
        self._called: Moment | None = None
        self._computed: Moment | None = None
        self._stepping: Moment | None = None

    # --- moments, as the seams report them ---------------------------------------------------------------------------

    def loading(self) -> Moment:
        """The loop asks for a batch."""
        self.activity, now = "compute", self._now()
        if self._stepped:
            self.commit(now)
        return now

    def loaded(self, since: Moment, batch: object) -> None:
        """It has got one."""
        self._mark = self._now()
        if not self._shown:
            self._lengths = lengths_of(batch)
        self._put("data_wait", since, self._mark, micro_batch=self._number)

    def called(self, batch: object) -> None:
        """The model is given this, which the loader may have read long before; its lengths count instead of the loader's. Not
        what a part of it is given once more in the backward pass, where activations are computed again."""
        if self._called is not None:
            return
        self._shown = lengths_of(batch)
        self._lengths = self._shown or self._lengths

    def backward(self, loss: float | None) -> None:
        """`backward()` is called."""
        now = self._now()
        if self._stepped:
            self.commit(self._mark)
        self._called, self._computed = now, None
        self._put("F", self._mark, now, micro_batch=self._number, first_layer=0, n_layers=1)
        if loss is not None:
            self._losses.append(loss)

    def computed(self) -> None:
        """The rank's own gradients are there; others' may be waited for."""
        self._computed, self.activity = self._now(), "collective"

    def returned(self) -> None:
        """`backward()` has returned."""
        begun, now = self._called, self._now()
        if begun is None:
            return
        end, number = self._computed or now, self._number
        self._put("B", begun, end, micro_batch=number, first_layer=0, n_layers=1)
        if self.ranks > 1 and now.ns - end.ns >= 1000 * LEAST_WAIT_US:
            self._put("all_reduce", end, now, group=self._group, group_seq=self.iteration)
        self._emit(MicroBatchPacked(iteration=self.iteration, micro_batch=number, attempt=0, lengths=self._lengths))
        self._tokens += sum(self._lengths) if len(self._lengths) > 1 else 0
        self._mark, self._called, self._lengths, self.activity = now, None, (), "compute"
        self.micro_batches += 1

    def stepping(self) -> None:
        """An optimizer begins its step."""
        if self._stepping is None:
            self._stepping = self._now()

    def stepped(self) -> None:
        """It has ended; where the loop runs forward and backward inside of it, what is left is the optimizer's."""
        if self._stepping is not None:
            begun, self._mark, self._stepping = max(self._stepping, self._mark), self._now(), None
            self._put("optimizer", begun, self._mark)
            self._stepped = True

    def entered(self) -> None:
        """The loop says itself that a step begins."""
        if self._stepped:
            self.commit(self._mark)

    def left(self) -> None:
        """That step is over."""
        self._mark, self._stepped = self._now(), True

    def wait(self) -> tuple[int, str]:
        """A wait for others begins; what it returns goes to `waited`."""
        before, self.activity = self.activity, "collective"
        return self._clock()[0], before

    def waited(self, since_ns: int, before: str) -> None:
        """It is over."""
        self._waited_ns += self._clock()[0] - since_ns
        self.activity = before

    def note(self, tokens: int | None, loss: float | None) -> None:
        """What the loop itself says of the iteration that it is in."""
        self._noted_tokens = tokens if tokens is not None else self._noted_tokens
        self._noted_loss = loss if loss is not None else self._noted_loss

    def commit(self, at: Moment) -> None:
        """The iteration is over."""
        self._put_other(at)
        loss = self._noted_loss
        if loss is None:
            loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self._emit(
            IterationCommitted(
                iteration=self.iteration,
                plan_version=0,
                attempt=0,
                rank=self.rank,
                loss=loss,
                tokens=self._tokens if self._noted_tokens is None else self._noted_tokens,
                start_us=self._begun.ns // 1000,
                wall_us=(at.ns - self._begun.ns) // 1000,
                log_complete=True,
            )
        )
        self.iteration += 1
        self._begun, self._stepped, self.micro_batches, self._losses, self._tokens = at, False, 0, [], 0
        self._named_us = self._named_own_us = self._named_waited_us = self._named_ready_us = 0
        self._noted_loss = self._noted_tokens = None

    def finish(self) -> None:
        """The loop is over; an iteration whose optimizer has stepped counts."""
        if self._stepped:
            self.commit(self._mark)

    # -----------------------------------------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """The present micro-batch among those of all ranks."""
        return self.micro_batches * self.ranks + self.rank

    def _now(self) -> Moment:
        self.progress += 1
        return Moment(*self._clock(), self._waited_ns)

    def _put_other(self, at: Moment) -> None:
        """What the iteration took beyond all that has a name; a framework may ask the other ranks something there."""
        wall_us, own_us, ready_us, waited_us = _spent_us(self._begun, at)
        waited_us, ready_us = max(waited_us - self._named_waited_us, 0), max(ready_us - self._named_ready_us, 0)
        rest_us, own_us = max(wall_us - self._named_us, 0), max(own_us - self._named_own_us, 0)
        self._span("other", self._begun, rest_us, own_us, wait_dp_us=waited_us or None, runq_us=ready_us)

    def _put(self, kind: SpanKind, begin: Moment, end: Moment, **fields: object) -> None:
        wall_us, own_us, ready_us, waited_us = _spent_us(begin, end)
        own_us = max(own_us, 0)
        self._named_us, self._named_own_us = self._named_us + wall_us, self._named_own_us + own_us
        self._named_waited_us, self._named_ready_us = self._named_waited_us + waited_us, self._named_ready_us + ready_us
        own = None if kind == "all_reduce" else own_us
        self._span(kind, begin, wall_us, own, wait_dp_us=waited_us or None, runq_us=ready_us, **fields)

    def _span(self, kind: SpanKind, begin: Moment, wall_us: int, own_us: int | None, **fields: object) -> None:
        self._emit(
            Span(
                kind=kind,
                device=self._device,
                rank=self.rank,
                plan_version=0,
                attempt=0,
                iteration=self.iteration,
                start_us=begin.ns // 1000,
                wall_us=wall_us,
                compute_us=own_us,
                **fields,  # type: ignore[arg-type]  # names of Span's own
            )
        )


def _spent_us(begin: Moment, end: Moment) -> tuple[int, int, int, int]:
    """Between two moments: by the wall clock, of the thread's own, ready without a core, waiting in collectives."""
    wall_us, ready_us = (end.ns - begin.ns) // 1000, (end.ready_ns - begin.ready_ns) // 1000
    waited_us = (end.waited_ns - begin.waited_ns) // 1000
    return wall_us, wall_us - ready_us - waited_us, ready_us, waited_us
