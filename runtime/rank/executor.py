"""Executes one rank's actions of one iteration: chunks, and the messages between them.

The action list comes from the plan (pipeline/schedule.py); any rank may execute any hop whose layers it holds, for any
replica. Where the schedule splits the backward pass, B computes the gradient of activations (and those of the few parameters
that are no matrices: norms, embedding) and W the gradients of the weight matrices. Receives are posted two actions ahead,
sends are waited for at the end, a hand-over within the rank costs nothing. Messages need no shapes: every rank knows each
micro-batch's lengths. Where gradients are to be summed while a backward pass goes on, the chunks that end it are executed in
parts (pipeline/gradient_sync.py). A message that takes a time of its own (runtime/links.py) carries in front when it arrives.
The members of a tensor-parallel group execute their chunks together and divide each message among them (shards/crossings.py).
An attempt that keeps gradients of the one before adds only those that are missing (scheduler/kept.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod

import msgspec
import torch
from torch import Tensor

from unskew.analytics.core.plan import Plan, splits_backward
from unskew.analytics.core.workload import work_of
from unskew.analytics.pipeline.actions import Action, ActionKey
from unskew.analytics.pipeline.gradient_sync import ActionStep
from unskew.analytics.scheduler.kept import KeptGradients
from unskew.analytics.shards.crossings import Crossing, crossings
from unskew.analytics.shards.parts import size_of
from unskew.collector.events import ChunkKind, Span
from unskew.runtime.chunk_clock import ChunkClocks, OwnTimes
from unskew.runtime.links import Links
from unskew.runtime.model.batch import Batch
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.model.model import Deferred, weight_gradients
from unskew.runtime.model.recompute import KeptLayers, backward, forward_keeping_inputs
from unskew.runtime.rank.comm import Comm, Pending, Team
from unskew.runtime.rank.device import ChunkOf, ChunkTiming, Device
from unskew.runtime.rank.progress import RankProgress

_LOOK_AHEAD = 2
_NOTHING = torch.empty(0)
_Key = tuple[str, int, int]
_NO_STEPS: Mapping[int, Sequence[ActionStep]] = {}


class ExecutedChunk(msgspec.Struct, gc=False):
    """A finished chunk: its action, when it ran, how long it had waited for its input, and the messages it sent and took."""

    action: Action
    timing: Callable[[], ChunkTiming]
    wait_us: int
    messages: list[Span]


class ExecutedWork(msgspec.Struct):
    """What was executed since it was last taken to the log: chunks, and messages that were waited for at the end."""

    chunks: list[ExecutedChunk] = msgspec.field(default_factory=list)
    own_us: OwnTimes = msgspec.field(default_factory=dict)
    sent: list[Span] = msgspec.field(default_factory=list)


class Executor:
    """One attempt at an iteration on one rank: leaves gradients and losses in the layers, with the micro-batches they are
    of."""

    def __init__(
        self,
        *,
        plan: Plan,
        actions: Sequence[Action],
        kept: KeptGradients,
        layers: Mapping[int, HeldLayer],
        batch: Batch,
        comm: Comm,
        device: Device,
        progress: RankProgress,
        label: Callable[..., Span],
        dtype: torch.dtype,
        shapes: Sequence[tuple[int, ...]],
        before: Callable[[int], None],
        links: Links,
        executed: ExecutedWork,
        steps: Mapping[int, Sequence[ActionStep]] = _NO_STEPS,
        closed: Callable[[Sequence[int]], None] = lambda _: None,
        computes: torch.dtype | None = None,
    ) -> None:
        """`steps`: what is executed in an action's turn, where it is not just that; `closed`: called with the layers to which
        nothing more is added; `computes`: the format of products, None = that of everything else, `dtype`."""
        self._plan, self._actions, self._kept, self._layers, self._batch = plan, actions, kept, layers, batch
        self._comm, self._device, self._progress, self._label, self._before = comm, device, progress, label, before
        self._dtype, self._shapes, self._links = dtype, shapes, links
        self._steps, self._closed = steps, closed
        self._computes = computes if computes != dtype else None
        self._parts: dict[ActionKey, list[Action]] = {}
        for step in (step for turn in steps.values() for step in turn):
            self._parts.setdefault(step.action.key, []).append(step.action)
        team = plan.team_of.get(comm.rank)
        by_tokens = plan.token_parts(comm.rank) > 1
        price = links.together_us
        self._team = None if team is None else Team(comm, team, progress, price, sequence_parallel=by_tokens)
        self._share = size_of(plan.role_of[comm.rank].part)
        self._arriving: dict[_Key, tuple[list[tuple[Crossing, Pending]], int]] = {}
        self._local: dict[_Key, Tensor] = {}
        self._split, self._held = splits_backward(plan.schedule), dict[tuple[int, int], list[KeptLayers]]()
        self._deferred: dict[tuple[int, int], dict[int, Deferred]] = {}
        self._half: set[tuple[int, int, int]] = set()  # (micro-batch, hop, layer): its B is executed, its W is not
        self._losses: dict[int, float] = {}
        self._sent: list[tuple[Pending, Span]] = []
        self._begun_us, self._executed = 0, executed
        self._clocks = ChunkClocks(plan, None if self._team else device.clock_ns, executed.own_us, batch.iteration)

    def run(self) -> None:
        """Execute all actions. Raises `PeerLost` when a peer is gone or this rank's groups are stopped."""
        self._begun_us = self._device.now_us()
        self._closed(())
        execute = {"F": self._forward, "B": self._backward, "W": self._weights}
        for index, action in enumerate(self._actions):
            self._before(index)
            for coming in self._actions[index : index + 1 + _LOOK_AHEAD]:
                self._post(coming)
            for step in self._steps.get(index, (ActionStep(action),)):
                execute[step.action.kind](step.action)
                self._closed(step.closes)
        with self._progress.waiting("send"):
            self._comm.wait([(pending, partial(self._was_sent, span)) for pending, span in self._sent])

    def _was_sent(self, span: Span) -> None:
        timed = span.peer is not None and self._links.timed(span.rank, span.peer)
        wall_us = span.wall_us if timed else self._device.now_us() - span.start_us
        self._executed.sent.append(msgspec.structs.replace(span, wall_us=wall_us))

    def finish_weights(self) -> None:
        """After a break: the gradients of weights whose backward pass is done, so that no micro-batch is half in a sum. The
        other members of a group are not asked for: they may be gone."""
        self._team = None
        for action in self._actions:
            for part in self._parts_of(action, "W") if action.kind == "W" else ():
                if (part.micro_batch, part.hop, part.first_layer) in self._half:
                    self._weights(part)

    def _forward(self, action: Action) -> None:
        micro_batch = action.micro_batch
        x, ready_us, wait_us, messages = self._inputs(action)
        if x is None:
            x = self._batch.inputs(micro_batch, self._device.torch_device)
        if action.first_layer > 0:
            x.requires_grad_(True)
        last = self._has_head(action)
        source, held, again = x, list[KeptLayers](), self._plan.recomputes(self._comm.rank, "B")
        self._held[micro_batch, action.hop] = held
        if self._split:
            self._deferred[micro_batch, action.hop] = {part.first_layer: [] for part in self._parts_of(action, "W")}

        def body() -> Tensor:
            y, end = source, action.first_layer + action.n_layers
            if again:
                y, kept = forward_keeping_inputs(y, action.first_layer, end, partial(self._layer, micro_batch, action.hop))
                held.extend(kept)
                return y
            self._clocks.forward(action, len(parts := self._parts_of(action, "B")))
            for part in reversed(parts):
                if held:  # the backward pass pauses here
                    y = y.detach().requires_grad_(True)
                begins = y
                for layer in range(part.first_layer, part.first_layer + part.n_layers):
                    self._clocks.before(action, layer, y)
                    y = self._layer(micro_batch, action.hop, layer, y)
                held.append(KeptLayers(part.first_layer, part.first_layer + part.n_layers, begins, y))
            return y

        y, timing = self._device.run(self._chunk(action, last, ready_us), body, self._team)
        self._done(action, timing, wait_us, messages)
        if last:
            self._losses[micro_batch] = float(y.detach())
        else:
            self._hand_on("F", action, action.hop + 1, y.detach())

    def _layer(self, micro_batch: int, hop: int, layer: int, x: Tensor) -> Tensor:
        """What a layer gives, the last one the loss."""
        module, deferred = self._layers[layer].module, self._deferred.get((micro_batch, hop), {})
        left = deferred[max(first for first in deferred if first <= layer)] if deferred else None
        with nullcontext() if self._computes is None else torch.autocast(x.device.type, self._computes):
            y: Tensor = module(x, self._batch.lengths[micro_batch], left, self._team).to(self._dtype)
        if layer == self._plan.n_layers - 1:
            targets = self._batch.targets(micro_batch, self._device.torch_device)
            y = module.loss(y, targets, self._team) / self._batch.target_tokens
        return y

    def _backward(self, action: Action) -> None:
        dy, ready_us, wait_us, messages = self._inputs(action)
        key = action.micro_batch, action.hop
        x = next(kept.x for kept in self._held[key] if kept.first == action.first_layer)
        body = partial(self._backward_of, action, dy)
        _, timing = self._device.run(self._chunk(action, self._has_head(action), ready_us), body, self._team)
        self._done(action, timing, wait_us, messages)
        if self._split:
            layers = range(action.first_layer, action.first_layer + action.n_layers)
            self._half.update((*key, layer) for layer in layers)
        if key in self._held and x.grad is not None:  # layers below are left
            self._local["B", *key] = x.grad
        elif x.grad is not None and self._kept.hands_back(action.micro_batch, action.first_layer):
            self._hand_on("B", action, action.hop - 1, x.grad)

    def _backward_of(self, action: Action, dy: Tensor | None) -> Tensor:
        key = action.micro_batch, action.hop
        due = [kept for kept in self._held[key] if kept.first >= action.first_layer]
        with self._adding(action, whole=not self._split, in_place=self._team is None):
            self._clocks.backward(action)
            backward(due, dy, partial(self._layer, *key))
            self._sum_uncut(action)
        del self._held[key][-len(due) :]  # only now: a break in the middle of it leaves it unexecuted
        if not self._held[key]:
            del self._held[key]
        return _NOTHING

    def _sum_uncut(self, action: Action) -> None:
        """Where each member has its tokens alone, the gradients of what all of them have are those of all tokens after this."""
        layers = range(action.first_layer, action.first_layer + action.n_layers)
        parameters = [one for layer in layers for one in self._layers[layer].uncut]
        if self._team is None or not self._team.sequence_parallel or not parameters:
            return
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        flat = self._team.sum(torch.cat([one.reshape(-1) for one in gradients]))
        for parameter, part in zip(parameters, torch.split(flat, [one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def _weights(self, action: Action) -> None:
        key = action.micro_batch, action.hop
        deferred = self._deferred[key].pop(action.first_layer)
        body = partial(self._weights_of, action, deferred)
        _, timing = self._device.run(self._chunk(action, self._has_head(action), 0), body, self._team)
        self._done(action, timing, 0, [])
        self._half.difference_update((*key, layer) for layer in range(action.first_layer, action.first_layer + action.n_layers))

    def _weights_of(self, action: Action, deferred: Deferred) -> Tensor:
        layers = range(action.first_layer, action.first_layer + action.n_layers)
        numbers = [number for number in layers if self._kept.counts(number, action.micro_batch)]
        lacking = {parameter for number in numbers for parameter in self._layers[number].parameters}
        with self._adding(action, whole=True, in_place=True):
            weight_gradients([one for one in deferred if one[0] in lacking])
        deferred.clear()
        return _NOTHING

    def _parts_of(self, action: Action, kind: ChunkKind) -> Sequence[Action]:
        """In which the chunk of this kind at the same place is executed, the last layers first."""
        return self._parts.get((kind, action.micro_batch, action.hop)) or [msgspec.structs.replace(action, kind=kind)]

    def _has_head(self, action: Action) -> bool:
        return action.first_layer + action.n_layers == self._plan.n_layers

    @contextmanager
    def _adding(self, action: Action, *, whole: bool, in_place: bool = False) -> Iterator[None]:
        """What is computed within is added to the gradients of the layers that lack this micro-batch, and to no others; to none
        where it breaks. Adding and marking are one: what a device does with a chunk after this may break, too, and a gradient
        that its layer does not know of would be computed and added again. `whole`: the micro-batch is in their sums then.
        `in_place`: nothing within waits for anybody, so it cannot break, and adds to them at once; of layers that have the
        micro-batch nothing is kept."""
        before = [
            (parameter, parameter.grad, counts)
            for number in range(action.first_layer, action.first_layer + action.n_layers)
            if not ((counts := self._kept.counts(number, action.micro_batch)) and in_place)
            for parameter in self._layers[number].parameters
        ]
        for parameter, _, _ in before:
            parameter.grad = None
        dropping = [one[0].register_post_accumulate_grad_hook(_drop) for one in before if in_place]  # type: ignore[no-untyped-call]
        ended = False
        try:
            yield
            ended = True
        finally:
            for hook in dropping:
                hook.remove()
            for parameter, gradient, counts in before:
                if not (ended and counts) or parameter.grad is None:
                    parameter.grad = gradient
                elif gradient is not None:
                    parameter.grad = gradient.add_(parameter.grad)
        for number in range(action.first_layer, action.first_layer + action.n_layers):
            if whole and self._kept.counts(number, action.micro_batch):
                self._layers[number].add(action.micro_batch, self._plan.plan_version, self._losses.get(action.micro_batch))

    def _chunk(self, action: Action, has_head: bool, ready_us: int) -> ChunkOf:
        work = work_of(self._batch.lengths[action.micro_batch])
        n_layers = self._plan.work_of(action.first_layer, action.n_layers)
        again = self._plan.recomputes(self._comm.rank, action.kind)
        return ChunkOf(action.kind, self._batch.iteration, n_layers, has_head, work, ready_us, self._split, self._share, again)

    def _source(self, action: Action) -> tuple[int, ...] | None:
        """The ranks that have this action's input, none of its own; None when it needs none, or has it."""
        hops = self._plan.routes[action.micro_batch].hops
        hop = {"F": action.hop - 1, "B": action.hop + 1}.get(action.kind, -1)
        return hops[hop].ranks if 0 <= hop < len(hops) and hops[hop].ranks != hops[action.hop].ranks else None

    def _post(self, action: Action) -> None:
        key = (action.kind, action.micro_batch, action.hop)
        source = self._source(action)
        if source is None or key in self._arriving:
            return
        posted = []
        receivers = self._plan.routes[action.micro_batch].hops[action.hop].ranks
        of_token = prod(self._shape(action))
        for one in crossings(self._batch.tokens(action.micro_batch), source, receivers):
            if one.receiver == self._comm.rank:
                size = (one.end - one.first) * of_token
                place = torch.empty(size + self._header(one.sender, one.receiver), dtype=self._dtype)
                posted.append((one, self._comm.receive(place, one.sender, _tag(*key))))
        self._arriving[key] = posted, self._device.now_us()

    def _inputs(self, action: Action) -> tuple[Tensor | None, int, int, list[Span]]:
        """(tensor [tokens, dim] or None, logical time it was ready, us waited, spans of the messages)."""
        key = (action.kind, action.micro_batch, action.hop)
        if key not in self._arriving:
            self._progress.working()
            return self._local.pop(key, None), 0, 0, []
        arriving, posted_us = self._arriving.pop(key)
        timed = all(self._header(one.sender, one.receiver) for one, _ in arriving)
        start_us = last_us = max(self._device.ended_us(), self._begun_us) if timed else self._device.now_us()
        parts, spans = [], []
        for one, pending in arriving:
            header = self._header(one.sender, one.receiver)
            with self._progress.waiting("recv", one.sender):
                flat = pending.wait()
                ready_us = self._arrived_us(flat[:header]) if header else self._device.now_us()
            spans.append(
                self._label(
                    kind="recv", start_us=start_us, wall_us=max(ready_us - start_us, 0), micro_batch=action.micro_batch,
                    peer=one.sender, first_layer=action.first_layer, bytes=flat.nbytes, posted_us=posted_us,
                )
            )  # fmt: skip
            parts.append(flat[header:])
            last_us = max(last_us, ready_us)
        flat = parts[0] if len(parts) == 1 else torch.cat([*parts, torch.empty(0, dtype=self._dtype)])
        tensor = flat.view(-1, *self._shape(action))
        if self._team is not None and not self._team.sequence_parallel:
            priced_us = self._team.priced_us
            tensor = self._team.gather_tokens(tensor, self._batch.tokens(action.micro_batch))
            last_us = last_us if self._device.emulated else self._device.now_us()
            last_us += round(self._team.priced_us - priced_us)
        return tensor.to(self._device.torch_device), last_us, last_us - start_us, spans

    def _shape(self, action: Action) -> tuple[int, ...]:
        """Of what this action takes, for each token."""
        return self._shapes[action.first_layer - 1 if action.kind == "F" else action.first_layer + action.n_layers - 1]

    def _header(self, sender: int, receiver: int) -> int:
        """Elements in front of a message over this link: when it arrives is one float64, or the room of one."""
        if not self._links.timed(sender, receiver):
            return 0
        return 8 // torch.empty((), dtype=self._dtype).element_size()

    def _arrived_us(self, clock: Tensor) -> int:
        """When the message with this in front arrives; not before, where time is real."""
        arrives_us = int(clock.view(torch.float64)[0])
        if not self._device.carries_time:
            time.sleep(max(arrives_us - self._device.now_us(), 0) / 1e6)
        return arrives_us if self._device.emulated else self._device.now_us()

    def _hand_on(self, kind: str, action: Action, hop: int, tensor: Tensor) -> None:
        """Give the result, or this rank's share of it, to those who execute the neighbouring hop."""
        key, hops = (kind, action.micro_batch, hop), self._plan.routes[action.micro_batch].hops
        if hops[hop].ranks == hops[action.hop].ranks:
            self._local[key] = tensor
            return
        tokens, here = self._batch.tokens(action.micro_batch), tensor.to("cpu")
        team = self._team
        begins = team.tokens_of(tokens).start if team is not None and team.sequence_parallel else 0
        for one in crossings(tokens, hops[action.hop].ranks, hops[hop].ranks):
            if one.sender == self._comm.rank:
                part = here[one.first - begins : one.end - begins]
                self._send(part.reshape(-1), one.receiver, action, _tag(*key))

    def _send(self, flat: Tensor, peer: int, action: Action, tag: int) -> None:
        posted_us, wall_us = self._device.now_us(), 0
        if self._header(self._comm.rank, peer):
            posted_us, arrives_us = self._links.sent(peer, flat.nbytes, self._batch.iteration)
            wall_us = arrives_us - posted_us
            flat = torch.cat((torch.tensor([float(arrives_us)], dtype=torch.float64).view(self._dtype), flat))
        pending = self._comm.send(flat, peer, tag)
        span = self._label(
            kind="send", start_us=posted_us, wall_us=wall_us, micro_batch=action.micro_batch, peer=peer,
            first_layer=action.first_layer, bytes=flat.nbytes, posted_us=posted_us,
        )  # fmt: skip
        self._sent.append((pending, span))

    def _done(self, action: Action, timing: Callable[[], ChunkTiming], wait_us: int, messages: list[Span]) -> None:
        self._progress.working()
        self._executed.chunks.append(ExecutedChunk(action, timing, wait_us, messages))


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _tag(kind: str, micro_batch: int, hop: int) -> int:
    return (hop * 65_536 + micro_batch) * 2 + (kind == "B")
