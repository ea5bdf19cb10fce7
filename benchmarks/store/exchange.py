"""The log in and out: import of a large trace, export and import again, and a run decided again from its log."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import polars
from support import datasets

from unskew.analytics.replay.replay import replay
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench
from unskew.collector.formats.exporters import straggler_analysis as straggler_export
from unskew.collector.formats.importers.straggler_analysis import COLUMNS
from unskew.collector.formats.registry import bring_in
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.recorded_run import recorded_run

IMPORT_S = 3.0
_REPEATS = 3
_ORDER = ["step", "rank", "optype", "seq_id"]
_PER_MICRO_BATCH = ("forward-compute", "backward-compute")
_MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
_ONCE = (
    "params-all-gather",
    "grads-reduce-scatter",
    "layernorm-grads-all-reduce",
    "optimizer-clip-main-grad",
    "optimizer",
    "gc",
)


def figures(bench: Bench) -> list[Figure]:
    """All of them; the run that is decided again is one on the virtual device, with a slow rank and a death."""
    return [*exchange(), *replayed(bench)]


def exchange() -> list[Figure]:
    """Import of 60,000 operations by the command, process start included; what export and import change."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = folder / "made.parquet"
        trace(60_000).write_parquet(made)
        traces = {"generated": made}
        if (real := datasets.find("bytedance-straggler", "ops-SE-windows12.parquet")) is not None:
            traces["ByteDance's SE, 59,904 operations"] = real
        found = []
        for what, path in traces.items():
            times = [_import_s(path, folder / f"{path.stem}-{repeat}") for repeat in range(_REPEATS)]
            note = f"{what}; the whole command, slowest of {_REPEATS}"
            found.append(figure("store: import of 60,000 operations", max(times), "s", bar=IMPORT_S, better="lower", note=note))
            changed = _changed(path, folder / f"{path.stem}-back")
            found.append(figure("store: rows that export and import change", changed, "rows", bar=0, better="lower", note=what))
    return found


def trace(operations: int) -> polars.DataFrame:
    """About so many operations of 32 replicas, 2 stages and 8 micro-batches."""
    random = np.random.default_rng(1)
    one = [(name, seq) for name in (*_PER_MICRO_BATCH, *_MESSAGES[:2]) for seq in range(8)] + [(name, 0) for name in _ONCE]
    steps = max(1, round(operations / (len(one) * 64)))
    rows = [
        (replica, stage, 2 * (32 * stage + replica), step, name, seq)
        for step in range(steps)
        for replica in range(32)
        for stage in range(2)
        for name, seq in one
    ]
    frame = polars.DataFrame(rows, schema=["dp_rank", "stage", "rank", "step", "optype", "seq_id"], orient="row")
    chunk = polars.col("optype").is_in(_PER_MICRO_BATCH)
    return frame.with_columns(
        start_ts=polars.Series(random.uniform(0, 9, frame.height)),
        duration=polars.Series(random.lognormal(-3, 1, frame.height)),
        mc=polars.when(chunk).then(0).otherwise(-1),
        mb_id=polars.when(chunk).then(polars.col("seq_id")).otherwise(-1),
        gmc=polars.when(chunk).then(polars.col("stage")).otherwise(-1),
    ).select(polars.col(name).cast(dtype) for name, dtype in COLUMNS.items())


def _import_s(path: Path, store: Path) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "unskew", "import", "straggler-analysis", str(path), "--store", str(store)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def _changed(path: Path, folder: Path) -> int:
    """Import, export, import the export, and count the rows of the original that are not in the last."""
    store = Store.locate(folder)
    (first,) = bring_in(store, "straggler-analysis", path)
    with open_store(store) as reader:
        straggler_export.write(reader, first.run, folder / "out.parquet")
    (second,) = bring_in(store, "straggler-analysis", folder / "out.parquet")
    with open_store(store) as reader:
        back = straggler_export.trace(reader, second.run)
    types = [polars.col(name).cast(dtype) for name, dtype in COLUMNS.items()]
    was, now = polars.read_parquet(path).select(types), back.select(types)
    same = was.sort(_ORDER).equals(now.sort(_ORDER))
    return 0 if same else was.join(now, on=list(COLUMNS), how="anti").height + abs(was.height - now.height)


def replayed(bench: Bench) -> list[Figure]:
    """Every decision of a real run against its replay, at its end and in the middle."""
    options = msgspec.structs.replace(EIGHT_RANKS, device="virtual", iterations=70, mode="auto")
    ran = bench.run(options, "slow:rank=3,factor=1.8,at=15", "kill:rank=6,at=45")
    with open_store(Store.locate(ran.options.store)) as reader:
        log = recorded_run(reader, ran.summary.run_id)
    began = time.perf_counter()
    results = [replay(log, until) for until in (None, 20, 50)]
    seconds = (time.perf_counter() - began) / len(results)
    note = f"of {results[0].compared} recorded, {seconds:.1f} s a replay; slow rank, death, changes of plan by themselves"
    different = sum(len(one.differences) for one in results)
    return [figure("store: decisions that a replay makes otherwise", different, "decisions", bar=0, better="lower", note=note)]
