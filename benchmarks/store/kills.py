"""A process of the store that kills itself, with SIGKILL, in the midst of its work: `python -m unskew.benchmarks.store.kills`.

    store_kills STORE WORK              WORK: collect, compact or rebuild; ends by itself and prints how many acts each part had
    store_kills STORE WORK PART NUMBER  the same, and dies right before act NUMBER of PART

An act is what the process asks of the file system that others could see: a file opened to be written, renamed or removed, a
folder made. Python reports each before it is done (`sys.addaudithook`), so a kill before every act leaves every state that a
kill can leave between two of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from unskew.collector.paths import Store
from unskew.collector.service.collecting import compact_all
from unskew.collector.service.maintenance import maintaining
from unskew.collector.service.rebuild import rebuild

PARTS = {
    ("sealing", "seal_next"): "seal",
    ("projecting", "publish"): "publish",
    ("compaction", "merge"): "compaction",
    ("snapshot", "write_snapshot"): "snapshot",
    ("rebuild", "rebuild"): "rebuild",
}
"""(module of collector/, function) -> part: an act belongs to the outermost of these that is running."""
_ACTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def spawn(store: Store, work: str, *aim: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", __spec__.name, str(store.root), work, *aim], stdout=subprocess.PIPE)


def acts(store: Store, work: str) -> Mapping[str, int]:
    """Do `work` to its end; how many acts each part of it had. Raises RuntimeError when it fails."""
    child = spawn(store, work)
    output, _ = child.communicate()
    if child.returncode:
        raise RuntimeError(f"{work} of {store.root} ended with {child.returncode}")
    counted: dict[str, int] = json.loads(output.splitlines()[-1])
    return counted


def die_at(part: str, number: int) -> Counter[str]:
    """From now on acts are counted, by part; before act `number` (from 1 on) of `part` the process kills itself."""
    counted = Counter[str]()

    def before(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _ACTS and not (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        now = _part()
        if now is not None:
            counted[now] += 1
            if (now, counted[now]) == (part, number):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(before)
    return counted


def _part() -> str | None:
    """The part that is running."""
    frame: FrameType | None = sys._getframe()
    found: str | None = None
    while frame is not None:
        code = frame.f_code
        found = PARTS.get((Path(code.co_filename).stem, code.co_name), found)
        frame = frame.f_back
    return found


def _do(root: str, work: str, part: str = "", number: str = "0") -> None:
    counted = die_at(part, int(number))
    if work == "collect":
        _collect(root)
    else:
        store = Store(Path(root))
        with maintaining(store):
            {"compact": compact_all, "rebuild": rebuild}[work](store)
    print(json.dumps(counted))


def _collect(root: str) -> None:
    """The collector in a hurry: small files, and everything at once."""
    from unskew.collector import background  # noqa: PLC0415
    from unskew.collector.service import collecting, compaction, projecting, sealing  # noqa: PLC0415
    from unskew.collector.service import process as service  # noqa: PLC0415

    background.NICENESS = background.LIGHT_NICENESS = 0  # it must reach the acts at which it is to die, whatever else runs
    compaction.MANY = 2
    service.STEP_S, collecting.COMPACT_S, sealing.SEAL_BYTES, projecting.PUBLISH_S = 0.05, 0.5, 1_200_000, 0.2
    service.main(["--store", root, "--idle-s", "0.2"])


if __name__ == "__main__":
    _do(*sys.argv[1:])
