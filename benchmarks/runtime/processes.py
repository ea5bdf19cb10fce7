"""Ranks as processes of this machine that talk by Gloo, without a run: one thread each, forked."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

FORK = multiprocessing.get_context("fork")
CPU = torch.device("cpu")


class Files:
    """Where processes find each other: a file that they share."""

    def __init__(self, path: str, ranks: int) -> None:
        self.store = FileStore(path, ranks)

    def publish(self, key: str, value: bytes) -> None:
        self.store.set(key, value)  # type: ignore[arg-type]

    def fetch(self, keys: Sequence[str], _: int) -> list[bytes]:
        return [bytes(self.store.get(key)) for key in keys]


def in_processes(ranks: int, live: Callable[[Files, int], Any]) -> list[Any]:
    """What `live` returns in a process for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, path = [FORK.Pipe(duplex=False) for _ in range(ranks)], f"{folder}/store"

        def begin(rank: int) -> None:
            os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "GLOO_ENABLE_STORE_V2_API": "1"}
            torch.set_num_threads(1)
            pipes[rank][1].send(live(Files(path, ranks), rank))

        processes = [FORK.Process(target=begin, args=(rank,), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        found = [pipe.recv() if pipe.poll(240) else None for pipe, _ in pipes]
        for process in processes:
            process.join(10)
            process.kill()
    return found
