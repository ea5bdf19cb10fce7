"""NVIDIA's published flight-recorder dumps, as the pickles they were flattened from."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars
from support.datasets import dataset

ENTRY = {
    "record_id": 7, "pg_id": 6, "process_group": ("43", "PIPELINE"), "collective_seq_id": 26, "p2p_seq_id": 0, "op_id": 12,
    "profiling_name": "nccl:all_reduce", "state": "scheduled", "is_p2p": False, "retired": False, "time_created_ns": 5_000,
    "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "duration_ms": 1.5, "timeout_ms": 1000,
    "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
}  # fmt: skip
DUMP = {
    "version": "2.5",
    "pg_config": {"43": {"name": "43", "desc": "PIPELINE", "ranks": "[0, 3]"}},
    "pg_status": {"6": {"last_enqueued_collective": 26, "last_started_collective": -1, "last_completed_collective": 25}},
    "entries": [ENTRY],
}


def published(case: str, folder: Path) -> polars.DataFrame:
    """Write the dumps of a published case as the pickles they were flattened from; returns the flat entries."""
    tables = {
        name: polars.read_parquet(dataset("nvrx-flight-recorder", f"{name}.parquet")).filter(polars.col("case") == case)
        for name in ("entries", "pg-status", "process-groups")
    }
    dumps: dict[int, dict[str, Any]] = defaultdict(lambda: {"entries": [], "pg_status": {}, "pg_config": {}})
    for row in tables["process-groups"].iter_rows(named=True):
        dumps[row["rank"]]["pg_config"][row["pg_id"]] = {"name": row["name"], "desc": row["desc"], "ranks": row["ranks"]}
    for row in tables["pg-status"].iter_rows(named=True):
        dumps[row["rank"]]["pg_status"][row["pg_id"]] = {
            name: row[name] for name in ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
        }
    for row in tables["entries"].iter_rows(named=True):
        sizes = {name: json.loads(row[name]) for name in ("input_sizes", "output_sizes", "input_dtypes")}
        dumps[row["rank"]]["entries"].append({**row, "process_group": (row["pg_name"], row["pg_desc"]), **sizes})
    (folder / "dumps").mkdir()
    for rank, dump in dumps.items():
        (folder / "dumps" / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    return tables["entries"]
