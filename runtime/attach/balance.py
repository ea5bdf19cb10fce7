"""The samples of a training that is not ours, divided among its ranks as the plan in force has it: `session.balance(loader)`.

The loader's own order is kept until a plan says otherwise, so that nothing changes where nothing acts. Every `VOTE_EVERY`
batches the ranks vote which plan all of them hold (one small all-reduce of ours): it is in force from the first window on of
which none of them has drawn anything, so all change at the same batch, however far their workers read ahead.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from unskew.analytics.core.division import Division, ahead, grouped, split, weights
from unskew.collector.events import LoaderDivided, SamplesDrawn, Telemetry
from unskew.collector.paths import Store
from unskew.runtime.attach.asked.plan_file import ACTS, PlanForRanks, read_plan
from unskew.runtime.attach.timeline import LoopTimeline
from unskew.runtime.attach.weights import Loss, can_shrink, loss_of, shrink, weigh

VOTE_EVERY = 8
MeanOver = Literal["samples", "tokens"]
Lengths = Sequence[int] | Callable[[Any], int]


class LoaderSession(Protocol):
    """What is needed of the process's session (session.py)."""

    store: Store
    run: str

    def loop(self) -> LoopTimeline | None: ...
    def emit(self, event: Telemetry) -> None: ...


class DrawnBatch(msgspec.Struct, frozen=True):
    """What this rank is given of one global batch: its weight; the plan; the first batch of its window, and how many of the
    window are behind the loop with this one. `drawn`: the lengths of the window's batches in the loader's order, with its
    first."""

    weight: float
    plan: PlanForRanks
    window_from: int
    behind: int
    drawn: tuple[tuple[int, ...], ...] = ()


class BalancedLoader:
    """Iterate over it in place of the loader. `state_dict` and `load_state_dict` keep the place within an epoch.

    Raises `ValueError` for a loader whose samples cannot be divided, in a sentence.
    """

    def __init__(
        self,
        session: LoaderSession,
        loader: DataLoader[Any],
        *,
        length: Lengths | None = None,
        mean_over: MeanOver = "samples",
        window: int = 8,
        model: Any = None,
    ) -> None:
        self._session, self._loader, self._length = session, loader, length
        self._by_tokens, self._window, self._model = mean_over == "tokens", window, model
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._samplers = _samplers(loader, self._ranks)
        if loader.batch_size is None or window < 1 or (self._by_tokens and length is None):
            raise ValueError("session.balance needs a loader with a batch_size, and length= where the mean is over tokens")
        self._own = Division(samples=(loader.batch_size,) * self._ranks)
        # By what all ranks have in common: one whose measuring has failed still votes.
        on = os.environ.get("UNSKEW") != "0"
        watched, group = _agreed(self._ranks, watched=os.environ.get(ACTS) == "1") if on else (False, None)
        self._group: Any = group
        at_once = on and not watched and length is not None
        first = msgspec.structs.replace(self._own, window=window) if at_once else self._own
        self._plan = PlanForRanks(plan_version=0, division=first)
        self._members = tuple(range(self._ranks))
        self._turn = self._at = self._announced = 0
        self._order: list[list[int]] = []
        self._coming: tuple[int, PlanForRanks] | None = None
        """Agreed, and not in force yet: from the first window on that begins at this batch or later."""
        self._given: deque[DrawnBatch] = deque()
        self._now: DrawnBatch | None = None
        self._loss: Loss | None = None
        self._reported = self._left = False
        self._place: dict[str, Any] | None = None
        if on:
            weigh(self._weight, self._seen)

    # --- what a loop asks of its loader ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def sampler(self) -> Any:
        """The loader's own, whose `set_epoch` counts."""
        return self._loader.sampler

    def set_epoch(self, epoch: int) -> None:
        """As the sampler's."""
        self._turn = epoch
        for sampler in (self._loader.sampler, *self._samplers):
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: in which epoch, behind which batch, under which plan."""
        now = self._now
        place = {} if now is None else {"window_from": now.window_from, "behind": now.behind}
        plan = self._plan if now is None else now.plan
        return {"epoch": self._turn, **place, "plan": msgspec.to_builtins(plan)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next epoch that is begun goes on there. Raises `msgspec.ValidationError` for what is no such state."""
        plan = msgspec.convert(state["plan"], PlanForRanks)
        self.set_epoch(int(state["epoch"]))
        if len(plan.division.samples) == self._ranks and plan.division.total == self._own.total:
            self._plan = plan
        self._place = dict(state) if "window_from" in state else None

    def __iter__(self) -> Iterator[Any]:
        if self._left:
            return
        self._given.clear()
        if isinstance(own := self._loader.sampler, DistributedSampler):
            self.set_epoch(own.epoch)
        if self._coming is not None:  # agreed on in an epoch that has ended
            self._coming = 0, self._coming[1]
        inner = iter(_with_batches(self._loader, self._batches()))
        for number in range(sys.maxsize):
            if self._group is not None and number % VOTE_EVERY == 0:
                self._vote()
            try:
                batch = next(inner)
            except StopIteration:
                break
            self._now = self._given.popleft()
            self._regroup(self._now.plan)
            self._report(self._now)
            yield batch
        self._now = None
        self._regroup(self._plan)

    # --- which samples are whose -------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[int]]:
        """This rank's part of each global batch."""
        batches = self._order = self._in_loaders_order()
        place, self._place = self._place, None
        first, skip = (0, 0) if place is None else (int(place["window_from"]), int(place["behind"]))
        self._at = first + skip
        self._announced = 0
        while first < len(batches):
            if not skip and self._coming is not None and self._coming[0] <= first:
                self._plan, self._coming = self._coming[1], None
            division = self._plan.division
            if not division.samples[self._rank]:
                return  # this rank leaves
            window = self._window_at(batches, first)
            lengths = [tuple(map(self._length_of, batch)) for batch in window]
            groups = grouped(lengths, division, f"{self._turn}-{first}")
            for behind, group in enumerate(groups[skip:], start=skip + 1):
                mine, weight = self._mine([lengths[batch][at] for batch, at in group])
                drawn = tuple(lengths) if behind == 1 and self._length is not None else ()
                self._at += 1
                self._given.append(DrawnBatch(weight, self._plan, first, behind, drawn))
                yield [window[batch][at] for batch, at in (group[one] for one in mine)]
            first, skip = first + len(window), 0

    def _window_at(self, batches: list[list[int]], first: int) -> list[list[int]]:
        """The global batches that are balanced together; one that is not whole is by itself."""
        found = [batches[first]]
        for batch in batches[first + 1 : first + max(self._plan.division.window, 1)]:
            if not len(batch) == len(found[0]) == self._own.total:
                break
            found.append(batch)
        return found

    def _mine(self, lengths: list[int]) -> tuple[list[int], float]:
        """Which samples of a global batch are this rank's, and their weight."""
        division = self._plan.division
        if len(lengths) != division.total:  # the last of an epoch
            division = Division(samples=_evenly(len(lengths), self._members, self._ranks))
        given = split(lengths, division)
        acts = division.window or self._plan.division.samples != self._own.samples
        return given[self._rank], weights(lengths, given, by_tokens=self._by_tokens)[self._rank] if acts else 1.0

    def _in_loaders_order(self) -> list[list[int]]:
        """The samples of each global batch, rank by rank."""
        of_rank = [list(sampler) for sampler in self._samplers]
        each = self._own.samples[0]
        found = [[index for of in of_rank for index in of[first : first + each]] for first in range(0, len(of_rank[0]), each)]
        return [batch for batch in found if len(batch) == self._own.total or not self._loader.drop_last]

    def _length_of(self, index: int) -> int:
        if self._length is None:
            return 1
        return int(self._length(self._loader.dataset[index]) if callable(self._length) else self._length[index])

    # --- plans -------------------------------------------------------------------------------------------------------

    def _vote(self) -> None:
        """Do all ranks hold the same plan, and which is the first batch that nobody has drawn?"""
        held = read_plan(self._session.store, self._session.run)
        version = held.plan_version if held is not None and self._fits(held.division) else 0
        ballot = torch.tensor([-version, version, self._at], dtype=torch.int64)
        dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self._group)
        least, most, first = -int(ballot[0]), int(ballot[1]), int(ballot[2])
        known = self._coming[1] if self._coming is not None else self._plan
        if held is not None and least == most > known.plan_version:
            self._coming = first, held

    def _fits(self, division: Division) -> bool:
        """Whether a plan keeps the global batch, and asks nothing of the loop that it has not offered."""
        samples, leave = division.samples, any(not division.samples[rank] for rank in self._members[: len(division.samples)])
        weighed = len(set(samples)) > 1 or (self._by_tokens and division.window)
        return (
            len(samples) == self._ranks
            and division.total == self._own.total
            and min(samples) >= 0
            and (not division.window or self._length is not None)
            and (not weighed or self._loss in {"mean", "global"})
            and (not leave or can_shrink(self._model))
        )

    def _regroup(self, plan: PlanForRanks) -> None:
        """Where the plan has no samples for a rank, that one leaves, and the others go on without it."""
        members = tuple(rank for rank, count in enumerate(plan.division.samples) if count)
        if members == self._members:
            return
        self._members, self._left = members, self._rank not in members
        of_model, of_votes = dist.new_group([*members]), dist.new_group([*members], backend="gloo")
        self._group = of_votes
        if self._left:
            print(f"unskew: rank {self._rank} has left the training, plan {plan.plan_version} goes on without", file=sys.stderr)
        else:
            shrink(self._model, of_model)

    def _report(self, now: DrawnBatch) -> None:
        """To the watcher: which plan the step follows, what can be divided here, how long the samples are."""
        if (loop := self._session.loop()) is None:
            return
        if now.plan.plan_version != loop.plan_version:
            loop.under(now.plan.plan_version, self._members)
        if not self._reported and self._loss is not None:
            self._reported = True
            divided = LoaderDivided(
                rank=self._rank, samples=self._own.samples, window=self._window, lengths=self._length is not None,
                loss=self._loss, by_tokens=self._by_tokens, leaves=can_shrink(self._model),
            )  # fmt: skip
            self._session.emit(divided)
        if now.drawn and self._rank == self._members[0]:
            coming = self._behind(now.window_from + len(now.drawn))
            self._session.emit(SamplesDrawn(iteration=loop.iteration, batches=now.drawn, coming=coming))

    def _behind(self, first: int) -> tuple[tuple[int, ...], ...]:
        """The lengths of the epoch's batches from `first` on, where no sample is to be read for them: many now and then."""
        count = ahead(self._window, self._own.total)
        if callable(self._length) or self._announced >= len(self._order) or first + count // 2 < self._announced:
            return ()
        self._announced = first + count
        return tuple(tuple(map(self._length_of, batch)) for batch in self._order[first : self._announced])

    # --- weights -----------------------------------------------------------------------------------------------------

    def _weight(self) -> float:
        return 1.0 if self._now is None or self._loss == "global" else self._now.weight

    def _seen(self, loss: torch.Tensor) -> None:
        if self._loss is None:
            self._loss = loss_of(loss)


def _agreed(ranks: int, *, watched: bool) -> tuple[bool, dist.ProcessGroup | None]:
    """Whether all ranks are watched, and then the group in which they vote: those of other nodes may have been started without
    the command that makes plans."""
    if ranks == 1:
        return watched, None
    group = dist.new_group(backend="gloo")
    ballot = torch.tensor([int(watched)])
    dist.all_reduce(ballot, op=dist.ReduceOp.MIN, group=group)
    return bool(ballot), group if ballot else None


def _samplers(loader: DataLoader[Any], ranks: int) -> list[Any]:
    """What draws each rank's samples: the loader's own sampler, as it stands on each of them."""
    own = loader.sampler
    if ranks == 1:
        return [own]
    if not isinstance(own, DistributedSampler):
        raise ValueError(f"session.balance needs a DistributedSampler where there are several ranks, not {type(own).__name__}")
    more = {"shuffle": own.shuffle, "drop_last": own.drop_last}
    return [DistributedSampler(loader.dataset, ranks, rank, seed=own.seed, **more) for rank in range(ranks)]


def _evenly(total: int, members: Sequence[int], ranks: int) -> tuple[int, ...]:
    base, more = divmod(total, len(members))
    of = {rank: base + (place < more) for place, rank in enumerate(members)}
    return tuple(of.get(rank, 0) for rank in range(ranks))


class _Batches:
    """A batch sampler that gives out what is drawn elsewhere."""

    def __init__(self, batches: Iterator[list[int]], count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches

    def __len__(self) -> int:
        return self._count


def _with_batches(loader: DataLoader[Any], batches: Iterator[list[int]]) -> DataLoader[Any]:
    """The same loader, given its batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=_Batches(batches, len(loader)),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
