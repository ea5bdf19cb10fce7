"""A training process as the store sees it: `python -m unskew.benchmarks.store.producer STORE RUN RANK COUNT PER_SECOND`.

Writes `count` spans of many kinds as one rank, 50 a flush, as fast as the disk takes them (PER_SECOND 0) or at a rate; prints
the seconds it took. Nothing is dropped: it waits for each flush.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unskew.collector.events import Span, SpanKind
from unskew.collector.paths import Store
from unskew.collector.write.spool import SpoolWriter

FLUSH = 50
MICRO_BATCHES = 8
_CHUNKS: tuple[tuple[SpanKind, float], ...] = (("F", 1.0), ("B", 2.0))


def spans(rank: int, seed: int = 0) -> Iterator[Span]:
    """The spans of one rank, iteration by iteration: chunks, transfers, a collective, the optimizer, with a device's jitter."""
    chance = random.Random(f"{seed} {rank}")
    device, stage = f"host-{rank // 8:04d}/gpu-{rank % 8}", rank % 4
    now_us, iteration = 1_000_000_000, 0
    while True:
        common: dict[str, Any] = {"device": device, "rank": rank, "plan_version": 0, "attempt": 0, "iteration": iteration}
        for micro_batch in range(MICRO_BATCHES):
            tokens = chance.uniform(0.6, 1.4)
            for kind, factor in _CHUNKS:
                wait_us = max(0, int(chance.gauss(900, 700)))
                peer = rank - 1 if kind == "F" else rank + 1
                common_here = {**common, "micro_batch": micro_batch}
                if stage:
                    yield Span(kind="recv", start_us=now_us, wall_us=wait_us + 40, posted_us=now_us - 15, peer=peer,
                               bytes=8_388_608, **common_here)  # fmt: skip
                work_us = int(20_000 * factor * tokens * chance.gauss(1.0, 0.008))
                start_us, now_us = now_us + wait_us + 60, now_us + wait_us + 75 + work_us
                yield Span(kind=kind, start_us=start_us, wall_us=work_us + 15, compute_us=work_us, first_layer=8 * stage,
                           n_layers=8, wait_tp_us=chance.randrange(40), wait_pp_us=wait_us, runq_us=chance.randrange(25),
                           **common_here)  # fmt: skip
                if stage < 3:
                    yield Span(kind="send", start_us=now_us, wall_us=chance.randrange(30, 60), posted_us=now_us - 4,
                               peer=2 * rank - peer, bytes=8_388_608, **common_here)  # fmt: skip
        wait_us = max(0, int(chance.gauss(4000, 1500)))
        yield Span(kind="all_reduce", start_us=now_us, wall_us=11_000 + wait_us, posted_us=now_us - 9, wait_dp_us=wait_us,
                   group=f"dp-{stage}", group_seq=iteration, bytes=402_653_184, **common)  # fmt: skip
        now_us += 11_000 + wait_us
        yield Span(kind="optimizer", start_us=now_us, wall_us=1500 + chance.randrange(90), compute_us=1490, **common)
        now_us += 1700
        iteration += 1


def produce(root: str, run: str, rank: int, count: int, per_second: int) -> None:
    source = spans(rank)
    batches = [[next(source) for _ in range(FLUSH)] for _ in range(count // FLUSH)]  # before the start: they cost time
    writer = SpoolWriter(Store(Path(root)), run, f"rank-{rank:04d}.1")
    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    for number, batch in enumerate(batches):
        for event in batch:
            writer.append(event)
        if per_second:
            time.sleep(max(0.0, began_s + (number + 1) * FLUSH / per_second - time.monotonic()))
        else:
            writer.hand_over(60.0)
    closed = writer.close(60.0)
    print(time.monotonic() - began_s, flush=True)
    sys.exit(not closed)


if __name__ == "__main__":
    produce(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
