"""What the store makes of kill -9 and of flipped bytes: everything flushed is there once, and no answer changes unnoticed."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb

from unskew.benchmarks.report import Figure, figure
from unskew.collector.check import check
from unskew.collector.paths import Store, StoreError
from unskew.collector.reader import open_store
from unskew.collector.views import VIEWS

KILLS = 50
MAINTENANCE_KILLS = 10
FLIPS = 200
PRODUCERS = 8
RUN = "bench"
_PRODUCER = """if True:
    import os, sys
    from itertools import islice
    from pathlib import Path
    from unskew.benchmarks.store_producer import spans
    from unskew.collector.paths import Store
    from unskew.collector.spool import SpoolWriter
    root, writer, rank, said = sys.argv[1:]
    out = os.open(said, os.O_WRONLY)
    spool, source, flushed = SpoolWriter(Store(Path(root)), "bench", writer), spans(int(rank)), 0
    while True:
        for event in islice(source, 50):
            spool.append(event)
        if spool.hand_over(60.0):
            flushed += 50
            os.pwrite(out, b"%012d" % flushed, 0)
"""
_COLLECTOR = """if True:
    import sys
    from unskew.collector import collecting, sealing, service
    service.STEP_S, collecting.COMPACT_S, sealing.SEAL_BYTES = 0.05, 0.5, 1_200_000
    sys.exit(service.main(sys.argv[1:]))
"""


def figures(kills: int = KILLS, maintenance_kills: int = MAINTENANCE_KILLS, flips: int = FLIPS) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="unskew-store-") as folder:
        store = Store(Path(folder) / "store")
        found = killed(store, kills)
        found += maintained(store, Path(folder), maintenance_kills)
        found += flipped(Path(folder), flips)
    return found


def killed(store: Store, kills: int) -> list[Figure]:
    """Collectors and producers killed in turn under load; what a producer knew to be flushed is looked for afterwards."""
    chance, flushed = random.Random(7), dict[str, int]()
    producers: list[tuple[Path, subprocess.Popen[bytes]]] = []
    names = (f"rank-{number % PRODUCERS:04d}.{number // PRODUCERS}" for number in range(10**6))

    def produce() -> None:
        said = store.root.with_name(next(names))
        said.touch()
        command = [sys.executable, "-c", _PRODUCER, str(store.root), said.name, str(len(producers)), str(said)]
        producers.append((said, subprocess.Popen(command)))

    def end_oldest() -> None:
        said, child = producers.pop(0)
        while not said.stat().st_size and child.poll() is None:  # it must have begun to be killed under load
            time.sleep(0.01)
        child.kill()
        child.wait()
        flushed[said.name] = int(said.read_bytes())

    store.root.mkdir(parents=True)
    for _ in range(PRODUCERS):
        produce()
    collecting = [sys.executable, "-c", _COLLECTOR, "--store", str(store.root), "--idle-s", "1"]
    for _ in range(kills):
        collector = subprocess.Popen(collecting)
        time.sleep(chance.uniform(0.3, 1.5))
        end_oldest()
        produce()
        time.sleep(chance.uniform(0.0, 0.5))
        collector.kill()
        collector.wait()
    while producers:
        end_oldest()
    subprocess.run(collecting, check=True)
    lost = doubled = total = 0
    with open_store(store) as reader:
        found = reader.sql("select writer, count(*), count(distinct seq), max(seq) + 1 from events group by writer").rows()
    held = {writer: (count, distinct) for writer, count, distinct, _ in found}
    for writer, count in flushed.items():
        rows, distinct = held.get(writer, (0, 0))
        lost, doubled, total = lost + max(count - distinct, 0), doubled + rows - distinct, total + rows
    holes = sum(due - distinct for _, _, distinct, due in found)
    note = f"{kills} collectors and {len(flushed)} producers killed -9, {total:,} events; sealing and merging every half second"
    return [
        figure("store: flushed events lost by kills", lost + holes, "", bar=0, better="lower", note=note),
        figure("store: events doubled by kills", doubled, "", bar=0, better="lower"),
    ]


def maintained(store: Store, folder: Path, kills: int) -> list[Figure]:
    """`store compact` and `store rebuild` killed at random moments: what the views say before and after."""
    truth, chance, wrong, hit = _answers(store), random.Random(8), 0, 0
    for number in range(kills):
        copy = Store(folder / "copy")
        shutil.copytree(store.root, copy.root)
        work = ("compact", "rebuild")[number % 2]
        child = subprocess.Popen(
            [sys.executable, "-m", "unskew", "store", work, "--store", str(copy.root)], stdout=subprocess.DEVNULL
        )
        time.sleep(chance.uniform(0.5, 4.0))
        child.send_signal(signal.SIGKILL)
        hit += child.wait() == -signal.SIGKILL
        wrong += _answers(copy) != truth
        wrong += not check(copy, mend=True).well or _answers(copy) != truth
        shutil.rmtree(copy.root)
    note = f"{hit} of {kills} were still at work when killed; views compared by digest, before and after `store check`"
    return [figure("store: answers changed by killing compact and rebuild", wrong, "", bar=0, better="lower", note=note)]


def flipped(folder: Path, flips: int) -> list[Figure]:
    """One bit of one file at a time, sealed, published, spooled, manifest: an answer changes, and `check` sees nothing."""
    store, chance = Store(folder / "flips"), random.Random(9)
    _small(store)
    truth = _answers(store)
    files = [path for path in sorted(store.root.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path for path in files if "locks" not in path.parts and path.suffix != ".log"]
    unnoticed = changed = 0
    for _ in range(flips):
        path = chance.choice(files)
        whole = path.read_bytes()
        at = chance.randrange(len(whole))
        path.chmod(0o644)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
        differs = _answers(store) != truth
        changed += differs
        unnoticed += differs and _is_well(store)
        path.write_bytes(whole)
    note = f"{flips} bits flipped in {len(files)} files, {changed} of them changed an answer"
    return [figure("store: flipped bits that change an answer unnoticed", unnoticed, "", bar=0, better="lower", note=note)]


def _small(store: Store) -> None:
    """A store with a run that is sealed and one that still lies in the spool."""
    collecting = [sys.executable, "-c", _COLLECTOR, "--store", str(store.root), "--idle-s", "0"]
    for run, collect in (("sealed", True), ("spooled", False)):
        command = [sys.executable, "-m", "unskew.benchmarks.store_producer", str(store.root), run, "1", "2000", "0"]
        subprocess.run(command, check=True, input="\n", text=True, stdout=subprocess.DEVNULL)
        if collect:
            subprocess.run(collecting, check=True)


def _is_well(store: Store) -> bool:
    try:
        return check(store, mend=False).well
    except StoreError:
        return False


def _answers(store: Store) -> dict[str, tuple[object, ...]] | str:
    """A digest of every view, or that the store cannot be asked."""
    try:
        with open_store(store) as reader:
            return {view: reader.sql(_digest(view)).row(0) for view in VIEWS}
    except (StoreError, duckdb.Error, OSError, UnicodeDecodeError) as error:
        return type(error).__name__


def _digest(view: str) -> str:
    columns = "* exclude (pos)" if view == "events" else "*"
    return f"select count(*), sum(hash(one)::hugeint)::varchar from (select {columns} from {view}) one"
