"""What ranks really hold against what was predicted of their plan before it came into force."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from unskew.analytics.core.plan import SCHEDULES
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench, FinishedRun
from unskew.collector.events import Heartbeat, PlanIssued
from unskew.runtime.options import RunOptions

OPTIONS = RunOptions(
    device="sleep", pp=2, dp=1, layers=8, dim=256, heads=4, tokens=512, micro_batches=8, iterations=3, mode="observe",
    checkpoint_every=0, respawns=0,
)  # fmt: skip
"""6M parameters: of 157 MiB that the first rank needs under 1F1B half are activations."""
TIGHT_MIB = 120
"""With so much both ranks recompute."""
BARE = msgspec.structs.replace(OPTIONS, dim=16, heads=1, tokens=16, iterations=12)
"""What a process takes that trains next to nothing, for long enough that its heart beats."""


def figures(bench: Bench) -> Iterator[Figure]:
    """Peak memory of a rank's process, less that of one that trains next to nothing, over what the plan says; the rank that is
    furthest off."""
    bare = peaks(bench.run(BARE))
    cases: dict[str, dict[str, Any]] = {name: {"schedule": name} for name in SCHEDULES if name != "searched"}
    cases["1f1b, recomputed"] = {"rank_mib": TIGHT_MIB}
    for case in bench.steps("memory of ranks, predicted against measured", [*cases]):
        run = bench.run(msgspec.structs.replace(OPTIONS, **cases[case]))
        (issued,) = run.of(PlanIssued)
        held = {rank: peak - bare[rank] for rank, peak in peaks(run).items()}
        off = {rank: held[rank] / issued.peak_bytes[str(rank)] - 1 for rank in held}
        parts = [f"rank {rank}: {held[rank] / 1e6:.0f} of {issued.peak_bytes[str(rank)] / 1e6:.0f} MB" for rank in sorted(held)]
        yield figure(
            f"memory of ranks, sleep, {case}: measured over predicted, furthest off",
            100 * max(map(abs, off.values())) if off else None, "%", bar=10.0, better="lower",
            note=run.failure or f"resident memory of the process less {bare[0] / 1e6:.0f} MB; {', '.join(parts)}",
        )  # fmt: skip


def peaks(run: FinishedRun) -> dict[int, int]:
    """Rank -> the most that its process held."""
    found: dict[int, int] = {}
    for beat in run.of(Heartbeat):
        found[beat.rank] = max(found.get(beat.rank, 0), beat.peak_bytes or 0)
    return found
