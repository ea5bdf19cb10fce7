"""What a rank of a foreign loop did, out of the moments that its seams report.

An iteration begins where the last one's optimizer step ended and ends with its own; it counts as committed when the next one
begins (a loop may step several optimizers). A micro-batch is the loop's path from a batch in hand to the end of `backward()`: F
from the batch to the call, B from the call until the rank's last gradient, then, as an all-reduce, until the call returns.

The loop pays for every line that runs here, and three times as much as a profile of these lines alone shows, as it comes to
them with cold caches. So there are moments only; whoever reads the log makes events of them (collector/files/loop_parts.py).
And what each micro-batch passes looks at the clock itself: a call of `_now` would cost it as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns

from unskew.collector.events import PipelinePlace, SpanKind
from unskew.collector.files.loop_parts import LoopPart, Moment, Piece, Reading
from unskew.runtime.attach.asked.probe_file import PRODUCTS
from unskew.runtime.attach.lengths import lengths_of

LEAST_WAIT_NS = 20_000
"""A shorter tail of `backward()` is no collective; where the clock is a GPU's, only that knows how long it is."""
MOST_NAMED = 64
"""Members of larger groups are not spelled out in the group's name."""
PART_NS, MOST_PIECES = 250_000_000, 64
"""A longer iteration is handed on in parts: a rank that is killed leaves what it had done."""
CLOSE_NS, FAR_NS, LEAST_NS = 200_000, 10_000_000, 1_000_000
"""The time without a core is read where so much has passed: close together while ranks take turns on their cores, which shows
in which work it fell (a look costs up to 10 us); else far apart, but at the end of each iteration of some length."""
LOSS_NS = 5_000_000
"""From the loss of one iteration to the next that is read: it costs the loop some 5 us a micro-batch."""
LITTLE = 50
"""A core is at hand while less than one part in so many is spent without it."""


class LoopTimeline:
    """Of one rank. `emit` takes what was done, `now` is the run's clock, `ready` says for how long the thread had no core;
    `waits` is told the begin and end of each wait for others, where `now` is not when the device comes to a moment."""

    __slots__ = (
        "_asked_ns", "_begun", "_called", "_chunk", "_clock", "_coming", "_computed", "_device", "_done", "_emit", "_ended",
        "_evaluation", "_first", "_frozen", "_group", "_least_wait_ns", "_lengths", "_loading", "_losses", "_mark",
        "_noted_loss", "_noted_tokens", "_number", "_packed", "_part", "_pause_ns", "_pieces", "_place", "_product",
        "_read_at_ns", "_readings", "_ready", "_shown", "_stages", "_stepped", "_stepping", "_tokens", "_waited_ns", "_waits",
        "activity", "asks", "engine", "gathers", "iteration", "plan_version", "probe_due", "rank", "ranks", "thread",
    )  # fmt: skip

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: str,
        emit: Callable[[LoopPart], None],
        *,
        ready: Callable[[], int],
        product: Callable[[], object] = lambda: None,
        now: Callable[[], int] = monotonic_ns,
        waits: Callable[[int, int], None] | None = None,
    ) -> None:
        self.rank, self.ranks, self._device, self._emit, self._ready, self._clock = rank, ranks, device, emit, ready, now
        self._waits, self._least_wait_ns = waits, LEAST_WAIT_NS if waits is None else 1
        self.thread = self.engine = get_ident()
        self._group = "-".join(map(str, range(ranks))) if ranks <= MOST_NAMED else "world"
        self.iteration = self._done = 0
        self._product = product
        self.probe_due = False
        """The rank is to measure itself at the end of this step."""
        self.plan_version = 0
        """By which the iteration in progress is given its samples."""
        self._first, self._coming = rank, 0
        self._number = rank
        """The present micro-batch among those of all ranks."""
        self.activity = "idle"
        self._waited_ns = self._read_at_ns = 0
        self._pieces: list[Piece] = []
        self._packed: list[tuple[int, tuple[int, ...]]] = []
        self._readings: list[Reading] = []
        self._pause_ns = CLOSE_NS
        self._begun = self._part = self._mark = self._now()
        self._ended = self._readings[-1]
        self._lengths: tuple[int, ...] = ()
        self._shown = False
        self.gathers: bool | None = None
        """Whether the coming backward pass ends with a wait for the other ranks' gradients; None = nobody said."""
        self._losses: list[float] = []
        self.asks, self._asked_ns = True, self._begun[0]
        """Whether the iteration's losses are to be read."""
        self._tokens = 0
        self._noted_loss: float | None = None
        self._noted_tokens: int | None = None
        self._stepped = False
        self._loading: Moment | None = None
        self._called: Moment | None = None
        self._computed: Moment | None = None
        self._stepping: Moment | None = None
        self._evaluation: tuple[int, Moment] | None = None
        self._place: PipelinePlace | None = None
        self._chunk: Moment | None = None
        self._stages: list[int] = []
        self._frozen: set[int] = set()
        """Models that a loop evaluates in its steps: a teacher, say."""

    @property
    def progress(self) -> int:
        """Pieces of work that are done; it stays where the rank hangs."""
        return self._done + len(self._pieces)

    # --- moments, as the seams report them ---------------------------------------------------------------------------

    def loading(self) -> None:
        """The loop asks for a batch."""
        if self._evaluation is not None:
            return
        now_ns = self._clock()
        if now_ns >= self._read_at_ns:
            self._read(now_ns)
        self.activity, self._loading = "compute", (now_ns, self._waited_ns)
        if self._stepped:
            self.commit(self._loading)

    def loaded(self, batch: object) -> None:
        """It has got one."""
        if self._loading is None or self._evaluation is not None:
            return
        now_ns = self._clock()
        if now_ns >= self._read_at_ns:
            self._read(now_ns)
        self._mark = now_ns, self._waited_ns
        if not self._shown:
            self._lengths = lengths_of(batch)
        self._pieces.append(("data_wait", self._loading, self._mark, self._number))
        self._loading = None  # a loader within another has ended before it

    def began_with(self, lengths: tuple[int, ...]) -> None:
        """What the first `backward()` is of, as a loader gave it before there was a timeline."""
        self._lengths = lengths

    def called(self, batch: object, *, gathers: bool) -> None:
        """The model is given this, which the loader may have read long before; its lengths count instead of the loader's. Not
        what a part of it is given once more in the backward pass, where activations are computed again. `gathers`: its
        backward pass ends with a wait for the other ranks' gradients."""
        self.gathers = gathers or self.gathers is True
        if self._called is None and self._evaluation is None and (lengths := lengths_of(batch)):
            self._shown, self._lengths = True, lengths

    def backward(self, loss: float | None) -> bool:
        """`backward()` is called. Whether others' gradients may be waited for at the end of the pass; a chunk's forward pass,
        which never syncs, does not tell."""
        if self._chunk is not None:
            self._losses += [] if loss is None else [loss]
            return self.ranks > 1
        now_ns = self._clock()
        if now_ns >= self._read_at_ns:
            self._read(now_ns)
        now = now_ns, self._waited_ns
        if self._evaluation is not None:  # of a part of what is trained
            self._frozen.add(self._evaluation[0])
            self._evaluation, self.activity = None, "compute"
        if self._stepped:
            self.commit(self._mark)
        self._called, self._computed = now, None
        self._pieces.append(("F", self._mark, now, self._number))
        if loss is not None:
            self._losses.append(loss)
        return self.ranks > 1 and self.gathers is not False

    def chunk_begins(self, place: PipelinePlace) -> None:
        """A stage of a pipeline computes a chunk; what it waited for its neighbours is over."""
        now = self._now()
        if self._stepped:
            self.commit(self._mark)
        self._place, self._chunk, self._computed = place, now, None

    def chunk_ends(self, kind: SpanKind, number: int, given: object | None) -> None:
        """It is done; `given`: what the first stage was given."""
        begun, self._chunk, place, now = self._chunk, None, self._place, self._now()
        if begun is None or place is None:
            return
        end, pipelines, first = self._computed or now, self.ranks // len(place.members), min(place.members)
        in_a_row = place.members[-1] - first < len(place.members)
        micro_batch = number * pipelines + (first // len(place.members) if in_a_row else first)
        self._stages.append(place.stage)
        self._pieces.append((kind, begun, end, micro_batch))
        if now[0] - end[0] >= self._least_wait_ns:
            self._pieces.append(("all_reduce", end, now, None))
        if given is not None:
            self._packed.append((micro_batch, lengths := lengths_of(given)))
            self._tokens += sum(lengths)
        self._mark, self.activity = now, "compute"
        if now[0] - self._part[0] >= PART_NS or len(self._pieces) >= MOST_PIECES:
            self._hand_on(now)

    def computed(self) -> None:
        """The rank's own gradients are there; others' may be waited for."""
        now_ns = self._clock()
        if now_ns >= self._read_at_ns:
            self._read(now_ns)
        self._computed, self.activity = (now_ns, self._waited_ns), "collective"

    def returned(self) -> None:
        """`backward()` has returned."""
        if (begun := self._called) is None:
            return
        now_ns = self._clock()
        if now_ns >= self._read_at_ns:
            self._read(now_ns)
        now = now_ns, self._waited_ns
        end, number = self._computed or now, self._number
        self._pieces.append(("B", begun, end, number))
        if self.ranks > 1 and now_ns - end[0] >= self._least_wait_ns:
            self._pieces.append(("all_reduce", end, now, None))
        noted = self._noted_tokens  # of the whole step; where nothing shows what its parts hold, they are taken for alike
        self._packed.append((number, self._lengths or ((noted,) if noted else ())))
        if len(self._lengths) > 1:
            self._tokens += sum(self._lengths)
        self._mark, self._called, self._lengths, self.activity, self.gathers = now, None, (), "compute", None
        self._number = number + self.ranks
        if now_ns - self._part[0] >= PART_NS or len(self._pieces) >= MOST_PIECES:
            self._hand_on(now)

    def under(self, plan_version: int, members: tuple[int, ...]) -> None:
        """From the next iteration on the samples are given by this plan, to these ranks."""
        fresh = self._number == self._first and not self._stepped
        self._coming, self._first, self.ranks = plan_version, members.index(self.rank), len(members)
        self._group = "-".join(map(str, members)) if len(members) <= MOST_NAMED else "world"
        if fresh:
            self.plan_version, self._number = plan_version, self._first

    def stepping(self) -> None:
        """An optimizer begins its step."""
        if self._stepping is None:
            now_ns = self._clock()
            if now_ns >= self._read_at_ns:
                self._read(now_ns)
            self._stepping = now_ns, self._waited_ns

    def stepped(self) -> None:
        """It has ended; where the loop runs forward and backward inside of it, what is left is the optimizer's."""
        if self._stepping is not None:
            now_ns = self._clock()
            if now_ns >= self._read_at_ns or now_ns - self._readings[-1][0] >= LEAST_NS:
                self._read(now_ns)
            begun, self._mark, self._stepping = max(self._stepping, self._mark), (now_ns, self._waited_ns), None
            if self._readings[-1] is not self._ended:
                self._end()
            self._pieces.append(("optimizer", begun, self._mark, None))
            self._stepped = True
            if self.probe_due:
                self._probe()

    def entered(self) -> None:
        """The loop says itself that a step begins."""
        if self._stepped:
            self.commit(self._mark)

    def left(self) -> None:
        """That step is over."""
        self._mark, self._stepped = self._now(), True
        if self._mark[0] - self._readings[-1][0] >= LEAST_NS:
            self._read(self._mark[0])
        if self._readings[-1] is not self._ended:
            self._end()
        if self.probe_due:
            self._probe()

    def wait(self) -> tuple[int, str]:
        """A wait for others begins; what it returns goes to `waited`."""
        before, self.activity = self.activity, "collective"
        now_ns = self._clock()
        if self._pause_ns == CLOSE_NS and now_ns >= self._read_at_ns:
            self._read(now_ns)
        return now_ns, before

    def waited(self, since_ns: int, before: str) -> None:
        """It is over. A thread that is woken may have to wait for its core as well: that is taken from the wait, not from the
        work beside it, where ranks take turns."""
        now_ns = self._clock()
        if self._pause_ns == CLOSE_NS:
            self._read(now_ns, now_ns - since_ns)
        else:
            self._waited_ns += now_ns - since_ns
        if self._waits is not None:
            self._waits(since_ns, now_ns)
        self.activity = before

    def moment(self) -> Moment:
        """Now."""
        return self._clock(), self._waited_ns

    def paused(self, kind: SpanKind, since: Moment, until: Moment) -> None:
        """The loop did something between its steps, or in the middle of one."""
        self._pieces.append((kind, since, until, None))

    def evaluates(self, model: int) -> None:
        """A model is evaluated from now on, unless a backward pass comes first."""
        if self._evaluation is None and model not in self._frozen:
            self._evaluation, self.activity = (model, self.moment()), "idle"

    def trains(self, model: int) -> None:
        """It is trained again."""
        if self._evaluation is not None and self._evaluation[0] == model:
            since, self._evaluation, self._mark = self._evaluation[1], None, self.moment()
            self.activity = "compute"
            self.paused("evaluation", since, self._mark)

    def note(self, tokens: int | None, loss: float | None) -> None:
        """What the loop itself says of the iteration that it is in."""
        self._noted_tokens = tokens if tokens is not None else self._noted_tokens
        self._noted_loss = loss if loss is not None else self._noted_loss

    def commit(self, at: Moment) -> None:
        """The iteration is over."""
        loss = self._noted_loss
        if loss is None and self._losses:
            loss = sum(self._losses) / len(self._losses)
        tokens = self._tokens if self._noted_tokens is None else self._noted_tokens
        self._hand_on(at, (self._begun[0], loss, tokens))
        self.iteration += 1
        self.plan_version = self._coming
        self._begun, self._stepped, self._number, self._losses, self._tokens = at, False, self._first, [], 0
        self._noted_loss = self._noted_tokens = None
        self.asks = at[0] - self._asked_ns >= LOSS_NS
        if self.asks:
            self._asked_ns = at[0]

    def finish(self) -> None:
        """The loop is over; an iteration whose optimizer has stepped counts."""
        if self._stepped:
            self.commit(self._mark)
        elif self._pieces:
            self._hand_on(self._now())

    # -----------------------------------------------------------------------------------------------------------------

    def _now(self) -> Moment:
        now_ns = self._clock()
        if now_ns >= self._read_at_ns:
            self._read(now_ns)
        return now_ns, self._waited_ns

    def _read(self, now_ns: int, waiting_ns: int = 0) -> None:
        """How long the thread had no core; `waiting_ns`: so long it has just waited for others, since the last such look."""
        ready_ns = self._ready()
        if waiting_ns:
            self._waited_ns += max(waiting_ns - (ready_ns - self._readings[-1][2]), 0)
        reading = now_ns, self._waited_ns, ready_ns
        if self._readings and not _has_core(self._readings[-1], reading):
            self._pause_ns = CLOSE_NS
        self._readings.append(reading)
        self._read_at_ns = now_ns + self._pause_ns

    def _end(self) -> None:
        """Of an iteration, with a new reading: the one moment at which ranks that took turns are found not to any more."""
        before, self._ended = self._ended, self._readings[-1]
        if self._pause_ns == CLOSE_NS and _has_core(before, self._ended):
            self._pause_ns, self._read_at_ns = FAR_NS, self._ended[0] + FAR_NS

    def _probe(self) -> None:
        """Multiply the matrix, the first time to fetch it; each by the time for which the thread had a core."""
        self.probe_due = False
        self._product()
        for _ in range(PRODUCTS):
            begun = self._read_now()
            self._product()
            self._mark = self._read_now()
            self._pieces.append(("probe", begun, self._mark, None))

    def _read_now(self) -> Moment:
        self._read(now_ns := self._clock())
        return now_ns, self._waited_ns

    def _hand_on(self, until: Moment, commit: tuple[int, float | None, int] | None = None) -> None:
        part = LoopPart(
            self.rank, self._device, self._group, self.iteration, self._part, until, self._pieces, self._packed,
            self._readings, commit, self.plan_version, self._stages,
        )  # fmt: skip
        self._emit(part)
        self._done += len(self._pieces)
        last = len(self._readings) - 1
        while last and self._readings[last][0] > until[0]:  # the next part begins before the moment that is the newest
            last -= 1
        self._part, self._pieces, self._packed, self._readings = until, [], [], self._readings[last:]
        self._stages = []


def _has_core(since: Reading, until: Reading) -> bool:
    return (until[2] - since[2]) * LITTLE <= until[0] - since[0]
