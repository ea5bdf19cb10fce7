"""A message of which a part is there when its sender goes: Gloo never ends its receive, so a rank must be able to leave it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRIES, FLOATS = 24, 2_000_000
SCRIPT = """
import os, random, sys, threading, time, traceback
os.environ["GLOO_ENABLE_STORE_V2_API"] = "1"
from pathlib import Path
import torch
from unskew.runtime.rank.comm import Comm, PeerLost

folder, tries, floats = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

class Meeting:
    def publish(self, key, value):
        (folder / "new").mkdir(exist_ok=True)
        new = folder / "new" / key.replace("/", "_")
        new.write_bytes(value)
        new.rename(folder / key.replace("/", "_"))
    def fetch(self, keys, _):
        paths = [folder / key.replace("/", "_") for key in keys]
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
        return [path.read_bytes() for path in paths]

def sender(number, delay_s):
    comm = Comm(Meeting(), number, 1, (0, 1), [])
    comm.build()
    pending = comm.send(torch.ones(floats), 0, 7)
    time.sleep(delay_s)
    comm.stop()
    time.sleep(3)

def receiver(number):
    comm, ended = Comm(Meeting(), number, 0, (0, 1), []), threading.Event()
    comm.build()
    def receives():
        try:
            comm.receive(torch.empty(floats), 1, 7).wait()
        except PeerLost:
            pass
        ended.set()
    threading.Thread(target=receives, daemon=True).start()
    ended.wait(0.5)
    comm.stop()
    return 0 if ended.wait(2) else 3

def forked(do, *given):
    if (pid := os.fork()) == 0:
        try:
            os._exit(do(*given) or 0)
        except BaseException:
            traceback.print_exc()
            os._exit(9)
    return pid

chance, codes = random.Random(7), []
for number in range(1, tries + 1):
    sends = forked(sender, number, chance.uniform(0.0, 0.004))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(forked(receiver, number), 0)[1]))
    os.kill(sends, 9)
    os.waitpid(sends, 0)
print(*codes)
"""


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_receive_that_never_ends_is_left_when_the_groups_are_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(TRIES), str(FLOATS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
    assert done.stdout.split() == ["0"] * TRIES, done.stderr
