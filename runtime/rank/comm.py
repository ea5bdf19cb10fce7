"""Process groups of one plan version, built and dropped in living processes.

Built on torch's C++ groups without the global registry, so that groups may overlap and be rebuilt at will. Group ranks never
leave this module: callers name ranks as the run does. Every failure of a peer surfaces as `PeerLost`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from math import prod
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import _dist2

from unskew.analytics.shards.crossings import share_ends
from unskew.analytics.shards.together import steps_of_sum
from unskew.runtime.channel import open_sockets, opened_since, shut_sockets
from unskew.runtime.model.exchange import MOST_BYTES, Exchange
from unskew.runtime.rank.progress import LONGEST_WAIT, RankProgress

# All members are there when a group is built. One that dies in these milliseconds leaves it half built; Gloo tries five times.
_BUILD = timedelta(seconds=2)


class PeerLost(RuntimeError):  # noqa: N818 - an event of the run, not a defect
    """A peer closed its connections (it died, or it aborts), or this rank's own `Comm` was aborted."""


class Pending:
    """A sum or a message on its way; `wait` blocks until it is through and returns its tensor."""

    def __init__(self, waiter: _Waiter, work: Any, tensor: Tensor) -> None:
        self._waiter, self.work, self._tensor = waiter, work, tensor

    def wait(self) -> Tensor:
        self._waiter.wait(self.work)
        return self._tensor

    def done(self) -> bool:
        """Whether it is through, without waiting; also after `stop`."""
        if not self.work.is_completed():
            return False
        with suppress(RuntimeError):
            self.work.wait()
            return True
        return False


class _Waiter:
    """Waits for the backend in a thread of its own, so that a wait can be left when it never ends.

    A closed socket ends nearly every wait; but Gloo forgets a send whose write fails in the instant it becomes possible (seen
    once in some hundred kills) and a receive of which a part is there when its socket closes (of 8 MB, one in six), and whoever
    waits for such a one waits for ever. And who builds a group waits up to 10 s for a member that died before it connected: no
    socket is there yet that could be closed.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Any, _WaitOutcome] | None] = SimpleQueue()
        self._stopped = False
        self._waited: _WaitOutcome | None = None
        threading.Thread(target=self._serve, name="waiter", daemon=True).start()

    def wait(self, work: Any) -> None:
        """Until `work` is done. Raises `PeerLost` when it failed, or when `stop` was called."""
        waited = self._waited = _WaitOutcome()
        self._works.put((work, waited))
        if self._stopped:
            waited.over.set()
        waited.over.wait()
        if waited.defect is not None:
            raise waited.defect
        if waited.problem is not None:
            raise PeerLost(waited.problem.split("\n")[0])
        if not waited.done:
            raise PeerLost("the groups were stopped")

    def stop(self) -> None:
        self._stopped = True
        if self._waited is not None:
            self._waited.over.set()
        self._works.put(None)

    def _serve(self) -> None:
        while (item := self._works.get()) is not None:
            work, waited = item
            try:
                work.wait(LONGEST_WAIT)
                waited.done = True
            except RuntimeError as error:
                # Its text alone: an error holds this frame, and a rank collects no circles, so the groups would stay for ever.
                waited.problem = str(error)
            except Exception as error:
                waited.defect = error  # of ours: for whoever waits, who would do so for ever
            waited.over.set()


class _WaitOutcome:
    """How one wait ended."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.done = False
        self.problem: str | None = None
        self.defect: Exception | None = None


class _Doing:
    """Something that is done, as work to be waited for; when the wait is left it ends by itself, what connects groups with
    its sockets."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def wait(self, _: timedelta) -> None:
        self._do()


class Rendezvous(Protocol):
    """Where ranks find each other before they are connected."""

    def publish(self, key: str, value: bytes) -> None: ...

    def fetch(self, keys: Sequence[str], plan_version: int) -> Sequence[bytes]:
        """Block until all of `keys` are published. Raises `PeerLost` once plan `plan_version` is called off."""


class _GlooStore(Store):
    """All that Gloo asks of a store (GLOO_ENABLE_STORE_V2_API): it sets its own address and gets everybody's."""

    def __init__(self, rendezvous: Rendezvous, plan_version: int) -> None:
        super().__init__()
        self._rendezvous, self._plan_version = rendezvous, plan_version

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the stub says str; torch gives bytes
        self._rendezvous.publish(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._rendezvous.fetch(keys, self._plan_version))

    def has_extended_api(self) -> bool:
        return True


def arrive(rendezvous: Rendezvous, plan_version: int, rank: int) -> None:
    """Tell the others, without connecting to them, that this rank has come to where they build their groups."""
    rendezvous.publish(f"plan{plan_version}/here/{rank}", b"")


class Comm:
    """The groups of one plan version: all its ranks, and the tensor-parallel and gradient groups that this rank belongs to.

    `groups` lists every group of the plan in the same order on every rank; groups of one rank need no communication. The `team`
    among them that this rank belongs to has connections of its own besides.
    Where ranks hand their layers over and leave, a plan version has a `Comm` of another `phase` first: those are `awaited`
    before the plan's own groups are built. `stop` frees blocked calls here, and by closing, on the peers. It may be called
    from another thread, also while the groups are still being built.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        plan_version: int,
        rank: int,
        members: Sequence[int],
        groups: Sequence[tuple[int, ...]],
        *,
        team: tuple[int, ...] = (),
        awaited: Sequence[int] = (),
        phase: str = "",
    ) -> None:
        self.plan_version, self.rank, self.members = plan_version, rank, tuple(members)
        self._awaited, self._phase = tuple(awaited), phase
        self._before = open_sockets()
        self._own: dict[int, int] | None = None
        self._listing = threading.Lock()
        self.built = self._shut = False
        self._waiter = _Waiter()
        self._index = {member: index for index, member in enumerate(self.members)}
        self._rendezvous, self._store = rendezvous, _GlooStore(rendezvous, plan_version)
        self._groups: dict[tuple[int, ...], Any] = {}
        self._world: Any = None
        self._team = Exchange(rank, team) if len(team) > 1 else None
        self._wanted = [group for group in dict.fromkeys(groups) if rank in group and len(group) > 1]

    def build(self, stated: bytes = b"") -> dict[int, bytes]:
        """Meet the other members, then connect; what each has `stated` when it came. Raises `PeerLost`, also when the plan is
        called off."""
        try:
            # What Gloo builds has a time limit that begins with its first member: so all are here before.
            heard = self._meet("here", stated, self._awaited)
            self._waiter.wait(_Doing(self._connect))
            self.built = True
            return heard
        finally:
            # Whatever this process opens from here on is not the groups', also when they were not built, and also where `stop`
            # is just listing them in another thread.
            with self._listing:
                self._own = opened_since(self._before)

    def state_again(self, stated: bytes) -> dict[int, bytes]:
        """What each member states once more, after `build`. Raises `PeerLost`."""
        return self._meet("again", stated)

    def _meet(
        self, where: str, stated: bytes, awaited: Sequence[int] = (), *, members: Sequence[int] | None = None
    ) -> dict[int, bytes]:
        """Wait until all members have come, or some, and who is `awaited`; what the members stated."""
        place, members = f"plan{self.plan_version}{self._phase}/{where}", members or self.members
        self._rendezvous.publish(f"{place}/{self.rank}", stated)
        keys = [f"{place}/{member}" for member in (*members, *awaited)]
        return dict(zip(members, self._rendezvous.fetch(keys, self.plan_version), strict=False))

    def _connect(self) -> None:
        self._world = self._group("world", self.members)
        for group in self._wanted:
            self._groups[group] = self._group("g" + "-".join(map(str, group)), group)
        if self._team is not None:
            with _peer_lost():
                self._team.connect(partial(self._meet, "team", members=self._team.members))

    def _group(self, name: str, members: Sequence[int]) -> Any:
        store = PrefixStore(f"plan{self.plan_version}{self._phase}/{name}", self._store)
        group = _dist2._BACKENDS["gloo"](store, members.index(self.rank), len(members), _BUILD, torch.device("cpu"))
        group.set_timeout(LONGEST_WAIT)
        return group

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        with _peer_lost():
            return Pending(self._waiter, self._world.send([tensor], self._index[peer], tag), tensor)

    def wait(self, sent: Sequence[tuple[Pending, Callable[[], None]]]) -> None:
        """For all these, one after the other; what belongs to each is called when it is through, in another thread, which is
        asked once for all. Raises `PeerLost`."""

        def in_turn() -> None:
            for pending, through in sent:
                pending.work.wait(LONGEST_WAIT)
                through()

        if sent:
            self._waiter.wait(_Doing(in_turn))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into `tensor`, which must have exactly the message's size: Gloo would not notice a short message."""
        with _peer_lost():
            return Pending(self._waiter, self._world.recv([tensor], self._index[peer], tag), tensor)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Begin to sum `tensor` in place over a group of the plan, of two or more."""
        with _peer_lost():
            return Pending(self._waiter, self._groups[group].allreduce([tensor]), tensor)

    def sum(self, tensor: Tensor, group: tuple[int, ...]) -> Tensor:
        """Sum `tensor` in place over a group of the plan, and wait for it. Raises `PeerLost`."""
        if (team := self._directly(tensor, group)) is None:
            return self.all_reduce(tensor, group).wait()
        with _peer_lost():
            return team.sum(tensor)

    def _directly(self, tensor: Tensor, group: tuple[int, ...] | None) -> Exchange | None:
        """What takes it in the backend's place."""
        return self._team if self._team and self._team.members == group and tensor.nbytes <= MOST_BYTES else None

    def all_gather(self, row: Tensor, group: tuple[int, ...] | None = None) -> Tensor:
        """Every member's `row` as one tensor [members, ...], in the order of `members`, or of a group's."""
        if (team := self._directly(row, group)) is not None:
            with _peer_lost():
                return team.gather(row)
        rows = [torch.empty_like(row) for _ in group or self.members]
        with _peer_lost():
            work = (self._world if group is None else self._groups[group]).allgather([rows], [row])
        self._waiter.wait(work)
        return torch.stack(rows)

    def all_to_all(self, tensor: Tensor, lengths: Sequence[int], group: tuple[int, ...]) -> Tensor:
        """`lengths[m]` rows of `tensor` go to member m of a group; what all members have for this one: [member, row, ...]."""
        own = lengths[group.index(self.rank)]
        rows = tensor.new_empty(len(group) * own, *tensor.shape[1:])
        with _peer_lost():
            work = self._groups[group].alltoall_base(rows, tensor, [own] * len(group), list(lengths))
        self._waiter.wait(work)
        return rows.view(len(group), own, *tensor.shape[1:])

    def stop(self) -> None:
        """Shut the sockets of this plan's groups: Gloo's own abort frees nobody, a closed socket frees both ends in
        milliseconds."""
        self._waiter.stop()
        with self._listing:
            if not self._shut:
                self._shut = self._own is not None  # else more of them may be opened still
                shut_sockets(self._own if self._own is not None else opened_since(self._before))

    def drop(self) -> None:
        """Stop, and let go of the groups without waiting: their end, which joins threads of Gloo, takes a second where a
        peer has died in the middle of a sum, and all who go on would wait for this rank."""
        self.stop()
        if self._team is not None:
            self._team.close()
        groups = [*self._groups.values(), self._world]
        self._groups, self._world = {}, None
        threading.Thread(target=groups.clear, name="dropped groups", daemon=True).start()


class Team:
    """This rank among the members of its tensor-parallel group; `sequence_parallel`: each has its tokens of what is not cut;
    `blocked_ns`: how long it has waited for them in all; `priced_us`: what their exchanges have taken in all by `price`: (steps
    of a ring, bytes of each) -> us."""

    def __init__(
        self,
        comm: Comm,
        ranks: tuple[int, ...],
        progress: RankProgress,
        price: Callable[[int, float], float] = lambda *_: 0.0,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        self._comm, self.ranks, self._progress, self._price = comm, ranks, progress, price
        self.sequence_parallel = sequence_parallel
        self.blocked_ns, self.priced_us = 0, 0.0

    def tokens_of(self, tokens: int) -> range:
        """Which of so many this member stands for."""
        ends, member = share_ends(tokens, len(self.ranks)), self.ranks.index(self._comm.rank)
        return range(ends[member], ends[member + 1])

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all members' tensors, in place; of rounded ones the sum is not. Raises `PeerLost`."""
        flat = tensor.to("cpu", torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype)
        self.priced_us += self._price(steps_of_sum(len(self.ranks)), flat.nbytes / len(self.ranks))
        with self._waiting():
            self._comm.sum(flat, self.ranks)
        return tensor if flat is tensor else tensor.copy_(flat)

    def sum_tokens(self, tensor: Tensor) -> Tensor:
        """Of the sum of all members' tensors [token, ...] this member's tokens. Raises `PeerLost`."""
        flat = tensor.to("cpu", torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype).contiguous()
        lengths = self._lengths(len(flat))
        self.priced_us += self._price(steps_of_sum(len(self.ranks)) // 2, flat.nbytes / len(self.ranks))
        with self._waiting():
            parts = self._comm.all_to_all(flat, lengths, self.ranks)
        return parts.sum(0).to(tensor.device, tensor.dtype)

    def gather_tokens(self, own: Tensor, tokens: int) -> Tensor:
        """All of so many tokens, of which each member has its own. Raises `PeerLost`."""
        lengths = self._lengths(tokens)
        n_bytes = tokens * prod(own.shape[1:]) * own.element_size()
        self.priced_us += self._price(steps_of_sum(len(self.ranks)) // 2, n_bytes / len(self.ranks))
        padding = own.new_empty(max(lengths) - len(own), *own.shape[1:])
        rows = self.gather_unpriced(torch.cat((own, padding)) if len(padding) else own)
        return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])

    def _lengths(self, tokens: int) -> list[int]:
        return [end - first for first, end in pairwise(share_ends(tokens, len(self.ranks)))]

    def gather(self, tensor: Tensor) -> Tensor:
        """All members' tensors: [member, ...]. Raises `PeerLost`."""
        self.priced_us += self._price(steps_of_sum(len(self.ranks)) // 2, tensor.nbytes)
        return self.gather_unpriced(tensor)

    def gather_unpriced(self, tensor: Tensor) -> Tensor:
        """The same of what no device would exchange: it has no price."""
        ours = tensor.to("cpu").contiguous()  # a GPU's own work ends first: that is no wait
        with self._waiting():
            gathered = self._comm.all_gather(ours, self.ranks)
        return gathered.to(tensor.device)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_ns = time.monotonic_ns()
        with self._progress.waiting("collective"):
            yield
        self.blocked_ns += time.monotonic_ns() - began_ns


class _peer_lost:  # noqa: N801  (reads as a statement)
    """Turn errors of the backend and of sockets into `PeerLost`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError | OSError) and not isinstance(error, PeerLost):
            raise PeerLost(str(error).split("\n")[0]) from error
