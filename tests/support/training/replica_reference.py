"""What FT-HSDP's rules let expect, computed in one process from the log: who contributed which of its batches to which step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import torch

from unskew.analytics.scheduler.replicas import micro_batches_of
from unskew.collector.events import Event, QuorumFormed, ReplicaStep
from unskew.runtime.corpus import load_corpus
from unskew.runtime.model.batch import Batch, drawn
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.options import RunOptions

Contributions = Mapping[int, Mapping[int, int]]
"""Iteration -> replica that contributed -> which batch of its stream."""


def contributions(events: Sequence[Event]) -> dict[int, dict[int, int]]:
    """By the log: of each iteration the commit of the newest plan counts, for whoever committed under an older one is gone; all
    whom its quorum calls healthy contributed to it, also who died before it could commit."""
    newest: dict[int, int] = {}
    for event in events:
        if isinstance(event, ReplicaStep) and event.committed:
            newest[event.iteration] = max(newest.get(event.iteration, -1), event.plan_version)
    healthy = {
        (event.iteration, event.plan_version): [
            replica for replica, state in zip(event.replicas, event.states, strict=True) if state == "healthy"
        ]
        for event in events
        if isinstance(event, QuorumFormed)
    }
    place, found = Counter[int](), dict[int, dict[int, int]]()
    for iteration, version in sorted(newest.items()):
        found[iteration] = {replica: place[replica] for replica in healthy[iteration, version]}
        place.update(found[iteration].keys())
    return found


def undisturbed_losses(options: RunOptions) -> list[float]:
    """The losses of a model that knows no ranks, and of no replica that was ever away."""
    whole = msgspec.structs.replace(options, tp=1)
    return expected_losses(whole, {number: dict.fromkeys(range(options.dp), number) for number in range(options.iterations)})


def expected_losses(options: RunOptions, contributed: Contributions) -> list[float]:
    """Of each iteration, by a model that knows no ranks: one sum over the micro-batches of who contributed, one update."""
    torch.set_num_threads(1)
    corpus, shares = load_corpus(options.corpus, options.tokens), micro_batches_of(options.first_plan())
    size = options.size
    dtype, cpu = getattr(torch, options.dtype), torch.device("cpu")
    layers = [HeldLayer(size, number, seed=options.seed, dtype=dtype, device=cpu) for number in range(size.n_layers)]
    losses = []
    for iteration in range(len(contributed)):
        documents = [
            drawn(corpus, options, position)[number]
            for replica, position in sorted(contributed[iteration].items())
            for number in shares[replica]
        ]
        batch = Batch(corpus, options, iteration, documents)
        loss = 0.0
        for number in range(len(documents)):
            y = batch.inputs(number, cpu)
            for layer in layers:
                y = layer.module(y, batch.lengths[number], None)
            of_one = torch.nn.functional.cross_entropy(y, batch.targets(number, cpu), reduction="sum") / batch.target_tokens
            of_one.backward()  # type: ignore[no-untyped-call]
            loss += float(of_one.detach())
        for layer in layers:
            layer.step()
        losses.append(loss)
    return losses
