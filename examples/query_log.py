"""What became of each run of a store: `python examples/query_log.py [STORE]`, the store of `make run` by default."""

from __future__ import annotations

import sys

import unskew
from unskew.collector.paths import StoreError

QUERY = """
    select run, status, iterations, verdicts.sentence
    from runs left join verdicts using (run)
    order by started_us, verdicts.at_iteration
"""


def main(store: str) -> None:
    with unskew.open(store) as log:
        for run, status, iterations, sentence in log.sql(QUERY).rows():
            print(f"{run}: {status}, {iterations} iterations; {sentence or 'no verdict while it ran'}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "data/store")
    except StoreError as error:
        sys.exit(str(error))
