"""Run as a script by the collector's tests: writes `count` spans to a store as one rank, some hundred a second, then exits.

python collector_producer.py STORE RUN RANK COUNT PER_SECOND
"""

import sys
import time
from pathlib import Path

from unskew.collector.events import Span
from unskew.collector.paths import Store
from unskew.collector.write import spool
from unskew.collector.write.spool import SpoolWriter


def main(root: str, run: str, rank: int, count: int, per_second: int) -> None:
    spool.ROTATE_BYTES = 32 * 1024
    writer = SpoolWriter(Store(Path(root)), run, f"rank-{rank:04d}.1")
    for number in range(count):
        writer.append(
            Span(
                kind="F",
                device=f"device-{rank}",
                rank=rank,
                plan_version=0,
                attempt=0,
                iteration=number // 50,
                start_us=number,
                wall_us=9,
            )
        )
        if number % 50 == 49:
            time.sleep(50 / per_second)
    sys.exit(not writer.close(10.0))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
