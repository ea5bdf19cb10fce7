"""What the store makes of kill -9 and of flipped bytes: everything flushed is there once, and no answer changes unnoticed."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import duckdb

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.store.kills import acts, spawn
from unskew.benchmarks.store.producer import spans
from unskew.collector.events import DeviceJoined, IterationCommitted, Note, RunFinished, RunStarted
from unskew.collector.files.manifest import load
from unskew.collector.locks import is_held
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.read.views import VIEWS
from unskew.collector.service import compaction
from unskew.collector.service.check import check
from unskew.collector.service.collecting import Collector
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

KILLS = 50
AIMED_KILLS = 50
"""In each part of the work at most, spread over its acts: of none there are so many, so each act is killed at."""
FLIPS = 200
PRODUCERS = 8
RUN = "bench"
_PRODUCER = """if True:
    import os, sys, time
    from itertools import islice
    from pathlib import Path
    from unskew.benchmarks.store.producer import spans
    from unskew.collector.write.control_stream import ControlStream
    from unskew.collector.events import Note
    from unskew.collector.paths import Store
    from unskew.collector.write.spool import SpoolWriter
    root, writer, rank, said = sys.argv[1:]
    out, store = os.open(said, os.O_WRONLY), Store(Path(root))
    spool, source, flushed = SpoolWriter(store, "bench", writer), spans(int(rank)), 0
    stream = ControlStream(store, "bench", writer, "control-" + writer)
    while True:
        for event in islice(source, 50):
            spool.append(event)
        if spool.hand_over(60.0):
            flushed += 50
        decided = stream.append(stream.version, [Note(text=writer, by="bench")] * 2, actor="bench")
        os.pwrite(out, b"%012d %012d" % (flushed, decided), 0)
        time.sleep(0.02)
"""
WORKS = {"collect": ("seal", "publish", "compaction"), "compact": ("compaction",), "rebuild": ("rebuild",)}
_LOAD_ACTS, _LOAD_S = 6, 5.0
"""Under load a kill is aimed at one of the first so many acts of a part, and waited for so long."""


def figures(bench: Bench, kills: int = KILLS, aimed_kills: int = AIMED_KILLS, flips: int = FLIPS) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="unskew-store-") as folder:
        found = killed(bench, Store(Path(folder) / "load"), kills)
        found += aimed(bench, Path(folder), aimed_kills)
        found += flipped(bench, Path(folder), flips)
    return found


def killed(bench: Bench, store: Store, kills: int) -> list[Figure]:
    """Collectors and producers killed in turn under load; what a producer knew to be flushed is looked for afterwards.

    Every other collector dies at a random moment, the others in the midst of sealing, publishing and merging, in turn.
    """
    chance, known = random.Random(7), dict[str, int]()
    producers: list[tuple[Path, subprocess.Popen[bytes]]] = []
    names = (f"rank-{number % PRODUCERS:04d}.{number // PRODUCERS}" for number in range(10**6))

    def produce() -> None:
        report = store.root.with_name(next(names))
        report.touch()
        command = [sys.executable, "-c", _PRODUCER, str(store.root), report.name, str(len(producers)), str(report)]
        producers.append((report, subprocess.Popen(command)))

    def end_oldest() -> None:
        report, child = producers.pop(0)
        while not report.stat().st_size and child.poll() is None:  # it must have begun to be killed under load
            time.sleep(0.01)
        child.kill()
        child.wait()
        known[report.name], known[f"control-{report.name}"] = map(int, report.read_bytes().split())

    store.root.mkdir(parents=True)
    for _ in range(PRODUCERS):
        produce()
    died = Counter[str]()
    for number in bench.steps("kills of collectors and producers under load", range(kills)):
        part = WORKS["collect"][number // 2 % 3] if number % 2 else ""
        collector = spawn(store, "collect", part, str(chance.randint(1, _LOAD_ACTS)))
        while not is_held(store.lock("collector")) and collector.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.1, 1.0))
        end_oldest()
        produce()
        with contextlib.suppress(subprocess.TimeoutExpired):
            collector.wait(_LOAD_S if part else chance.uniform(0.0, 0.5))
        died[f"in {part}" if collector.poll() is not None else "at any moment"] += 1
        collector.kill()
        collector.communicate()
    while producers:
        end_oldest()
    for _ in bench.steps("what is left is sealed", range(1)):
        acts(store, "collect")
    findings = check(store, mend=False).findings
    lost = doubled = total = 0
    with open_store(store) as reader:
        found = reader.sql(
            "select writer, count(*), count(distinct seq), max(seq) + 1 from events where stream is null group by writer "
            "union all select 'control-' || stream, count(*), count(distinct version), max(version) from events "
            "where stream is not null group by stream"
        ).rows()
    held = {writer: (count, distinct) for writer, count, distinct, _ in found}
    for writer, count in known.items():
        rows, distinct = held.get(writer, (0, 0))
        lost, doubled, total = lost + max(count - distinct, 0), doubled + rows - distinct, total + rows
    holes = sum(due - distinct for _, _, distinct, due in found)
    where = ", ".join(f"{count} {part}" for part, count in died.items())
    note = f"{kills} collectors ({where}) and {len(known) // 2} producers killed -9, {total:,} events"
    note += f", {sum(count for writer, count in known.items() if writer.startswith('control-')):,} of them decisions"
    note += "".join(f"; check: {finding.sentence}" for finding in findings)
    return [
        figure("store: flushed events lost by kills", lost + holes + len(findings), "", bar=0, better="lower", note=note),
        figure("store: events doubled by kills", doubled, "", bar=0, better="lower"),
    ]


def aimed(bench: Bench, folder: Path, kills: int) -> list[Figure]:
    """Kills at the acts of sealing, publishing, merging and rebuilding: what the views answer then, and when the work was
    redone.

    A kill is wrong when an answer is another one afterwards or after the next process has done the work to its end, or when
    `check` finds anything or something half-done is left.
    """
    origin = Store(folder / "origin")
    _portions(origin)
    truth, wrong, done = _answers(origin), list[str](), Counter[str]()
    copy = Store(folder / "copy")
    for work, part, number, of in bench.steps("kills in seal, publish, compaction, rebuild", list(_aims(origin, copy, kills))):
        shutil.copytree(origin.root, copy.root)
        child = spawn(copy, work, part, str(number))
        child.communicate()
        assert child.returncode == -signal.SIGKILL, f"{work} did not come to act {number} of {of} of {part}"
        same = _answers(copy) == truth
        acts(copy, work)
        same = same and _answers(copy) == truth
        if not same or check(copy, mend=False).findings or _left(copy):
            wrong.append(f"{work}: {part} {number}/{of}")
        done[part] += 1
        shutil.rmtree(copy.root)
    where = ", ".join(f"{count} {part}" for part, count in done.items())
    note = f"kill -9 before an act on the file system: {where}; views compared then and after the work was redone"
    note += f"; wrong: {', '.join(wrong)}" if wrong else ""
    return [
        figure(
            "store: answers changed by kills in seal, publish, compaction, rebuild",
            len(wrong),
            "",
            bar=0,
            better="lower",
            note=note,
        )
    ]


def _aims(origin: Store, copy: Store, kills: int) -> Iterator[tuple[str, str, int, int]]:
    """(work, part, act, acts of the part): the work done once shows how many there are; `kills` of each part, spread evenly."""
    for work, parts in WORKS.items():
        shutil.copytree(origin.root, copy.root)
        counted = acts(copy, work)
        shutil.rmtree(copy.root)
        for part in parts:
            of = counted.get(part, 0)
            several = min(kills, of)
            for number in range(several):
                yield work, part, 1 + int((number + 0.5) * of / several), of


def _portions(store: Store) -> None:
    """A run that is published, in small sealed files that are not merged; and one that still lies in the spool.

    Both say that they ended: of a run that did not, what the views answer changes with the clock.
    """
    most, compaction.SMALL_ROWS = compaction.SMALL_ROWS, 0  # nothing is small, so nothing is merged
    try:
        for number in range(3):
            _write(store, "over", number, last=number == 2)
            collecting = Collector(store)
            while collecting.step():
                pass
            collecting.close()
    finally:
        compaction.SMALL_ROWS = most
    _write(store, "open", 0, last=True)


def _write(store: Store, run: str, number: int, *, last: bool) -> None:
    """One life of a run's controller and of a rank; the last one ends the run."""
    stream = ControlStream(store, run, "control", f"controller.{number}")
    started = RunStarted(run=run, device="sleep", clock="monotonic", mode="auto", ranks=1, options={}, code="", version="")
    joined = DeviceJoined(device="host-0000/gpu-0", rank=0, node="host-0000", pid=1)
    if stream.version == 0:
        stream.append(0, [started, joined], actor="controller")
    for _ in range(3):
        stream.append(stream.version, [Note(text=f"life {number}", by="ada")], actor="controller")
    if last:
        stream.append(stream.version, [RunFinished(status="done", iterations=number + 1)], actor="controller")
    stream.close()
    writer = SpoolWriter(store, run, f"rank-0000.{number}")
    for span in islice(spans(0, seed=number), 600):
        writer.append(span)
    writer.append(
        IterationCommitted(
            iteration=number, plan_version=0, attempt=0, rank=0, loss=2.0, tokens=9, start_us=0, wall_us=9, log_complete=True
        )
    )
    if not writer.close(60.0):
        raise RuntimeError(f"{store.root} could not be written")


def _left(store: Store) -> bool:
    """Whether there is a half-written file, or a sealed one that the manifest does not name."""
    sealed = {path for path in store.root.glob("sealed/*/*") if path.suffix == ".parquet"}
    return any(store.root.glob("**/*.new")) or sealed != {store.root / one.file for one in load(store).sealed}


def flipped(bench: Bench, folder: Path, flips: int) -> list[Figure]:
    """One bit of one file at a time: an answer changes, and `check` sees nothing or claims to have mended what it did not.

    Files: sealed, published, spooled, the manifest, and store.duckdb, which is asked by itself.
    """
    store, chance = Store(folder / "flips"), random.Random(9)
    _portions(store)
    files = [path for path in sorted(store.root.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path for path in files if "locks" not in path.parts and path.suffix != ".log"]
    truth = {True: _database_answers(store), False: _answers(store)}
    unnoticed, changed = list[str](), Counter[str]()
    for _ in bench.steps("flipped bits", range(flips)):
        path = chance.choice(files)
        whole, at = path.read_bytes(), chance.randrange(path.stat().st_size)
        path.chmod(0o644)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
        asked = _database_answers if path == store.database else _answers
        if asked(store) != truth[path == store.database]:
            changed[path.relative_to(store.root).parts[0]] += 1
            if not _noticed(store, folder / "kept", truth):
                unnoticed.append(f"byte {at} of {path.relative_to(store.root)}")
        path.write_bytes(whole)
    where = ", ".join(f"{count} in {name}" for name, count in changed.items())
    note = f"{flips} bits flipped in {len(files)} files, {changed.total()} of them changed an answer: {where}"
    note += f"; unnoticed: {', '.join(unnoticed)}" if unnoticed else ""
    return [figure("store: flipped bits that change an answer unnoticed", len(unnoticed), "", bar=0, better="lower", note=note)]


def _noticed(store: Store, kept: Path, truth: Mapping[bool, object]) -> bool:
    """Whether `check` names what is wrong; what it claims to have mended must answer as before, or store.duckdb as readers
    do."""
    shutil.copytree(store.root, kept)
    try:
        checked = check(store, mend=True)
        if not checked.well:
            return True
        mended = _answers(store) == truth[False] and _database_answers(store) in truth.values()
        return bool(checked.findings) and mended and not check(store, mend=False).findings
    except StoreError:
        return True
    finally:
        shutil.rmtree(store.root)
        kept.rename(store.root)


def _answers(store: Store) -> dict[str, tuple[object, ...]] | str:
    """A digest of every view, or that the store cannot be asked."""
    try:
        with open_store(store) as reader:
            return {view: reader.sql(_digest(view)).row(0) for view in VIEWS}
    except (StoreError, duckdb.Error, OSError, UnicodeDecodeError) as error:
        return type(error).__name__


def _database_answers(store: Store) -> dict[str, tuple[object, ...]] | str:
    """The same of store.duckdb."""
    try:
        with duckdb.connect(str(store.database), read_only=True) as database:
            database.execute("set variable store = ?", [str(store.root)]).fetchall()
            return {view: database.sql(_digest(view)).fetchall()[0] for view in VIEWS}
    except (duckdb.Error, UnicodeDecodeError) as error:
        return type(error).__name__


def _digest(view: str) -> str:
    columns = "* exclude (pos)" if view == "events" else "*"
    return f"select count(*), sum(hash(one)::hugeint)::varchar from (select {columns} from {view}) one"
