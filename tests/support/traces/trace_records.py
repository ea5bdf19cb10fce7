"""One good record of other tools' files, for tests that bend it."""

from __future__ import annotations

TITAN = {
    "log_type_name": "step_end",
    "log_type": "event",
    "time_us": 9_000,
    "rank": 0,
    "step": 1,
    "value": 1.5,
    "task_name": "t",
}
ENTRY = {
    "record_id": 7, "process_group": ("43", "P"), "collective_seq_id": 26, "profiling_name": "n", "state": "scheduled",
    "duration_ms": 1,
}  # fmt: skip
OPERATION = {
    "dp_rank": [0, 0], "stage": [0, 0], "rank": [0, 0], "step": [1, 1], "optype": ["forward-compute", "backward-compute"],
    "start_ts": [0.0, 1.0], "duration": [1.0, 1.0], "seq_id": [0, 0], "mc": [0, 0], "mb_id": [0, 0], "gmc": [0, 0],
}  # fmt: skip
