"""The ranks of examples/profile_ddp.py as torchrun would start them, forked: `python profiled_job.py FOLDER --slow PART`."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from functools import partial

from support.jobs.forked_ranks import forked_ranks
from support.paths import ROOT

EXAMPLE = ROOT / "examples" / "profile_ddp.py"
RANKS = 2


def rank_of(port: int, rank: int) -> None:
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    os.environ.update(of_all, RANK=str(rank), LOCAL_RANK=str(rank))
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sys.exit(not forked_ranks(RANKS, partial(rank_of, port)))
