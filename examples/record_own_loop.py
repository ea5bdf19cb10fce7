"""A loop that is not ours: its step times go to a table, the table into a store, and a diagnosis comes out.

`python examples/record_own_loop.py [FOLDER]`; the loop gets slower in its middle, and the diagnosis says since when.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from pathlib import Path

STEPS, SLOW_FROM = 200, 120


def train_step(step: int) -> float:
    """Stands for a real one; returns its loss."""
    time.sleep(0.004 if step >= SLOW_FROM else 0.002)
    return 2.0 / (1 + step)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "times.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "seconds", "loss"])
        for step in range(STEPS):
            began = time.perf_counter()
            loss = train_step(step)
            table.writerow([step, time.perf_counter() - began, loss])
    unskew("import", "iteration-times", str(folder / "times.csv"), "--run", "mine", "--store", str(folder / "store"))
    unskew("diagnose", "mine", "--store", str(folder / "store"))


def unskew(*arguments: str) -> None:
    """The command, as in a shell."""
    subprocess.run([sys.executable, "-m", "unskew", *arguments], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "own-loop"))
