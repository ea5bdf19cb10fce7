"""The same losses by torchft and by us: one of four replicas is killed every 20 steps and started again.

torchft (Manager, Lighthouse, Gloo) is optional: `pip install torchft`. A step sleeps on both sides. Its replicas go on with
fewer samples while one is away; ours train them all, so their steps are longer then.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from unskew.benchmarks.recovery.torchft_job import Attempt, ReplicaKill, TorchftJob, attempts, kills
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench, FinishedRun, done
from unskew.collector.events import DeviceLost, IterationCommitted
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.runtime.options import RunOptions

OPTIONS = RunOptions(
    device="sleep", pp=1, dp=4, layers=8, micro_batches=16, dim=16, heads=1, tokens=128, iterations=100, dtype="float64",
    respawns=100, checkpoint_every=0,
)  # fmt: skip
EVERY = 20
JOIN_TIMEOUTS_MS = (10_000, 1_000)
"""Of the Lighthouse: what torchft's README starts it with, and one that is little longer than a step."""
_END_S = 300.0


class LossTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """`commits`: replica -> when it committed its steps; `losses`: (replica, when it was killed). Of `samples` that as many
    steps have without a loss `untrained` were not; of `tries` at a step so many were `committed`."""

    commits: Mapping[int, Sequence[float]]
    losses: Sequence[tuple[int, float]]
    samples: int
    untrained: int
    tries: int
    committed: int

    @property
    def usual_s(self) -> float:
        """From one step to the next."""
        return median(after - before for ends in self.commits.values() for before, after in pairwise(ends))

    def stalls(self, *, back: bool) -> list[float]:
        """Of each loss, or of each return: by how much the longest time from one step to the next exceeds the usual one, on any
        other replica, in seconds."""
        found = []
        for replica, at_s in self.losses:
            returned_s = next((end for end in self.commits.get(replica, ()) if end > at_s), None)
            moment_s = returned_s if back else at_s
            others = [other for other in self.commits if other != replica]
            if moment_s is not None and (gaps := [gap for other in others for gap in self._around(other, moment_s)]):
                found.append(max(gaps) - self.usual_s)
        return found

    def _around(self, replica: int, moment_s: float) -> list[float]:
        """The time from one step of a replica to its next that a moment lies in, and those beside it; not while it was away."""
        gaps = list(pairwise(self.commits[replica]))
        at = next((number for number, (before, after) in enumerate(gaps) if before <= moment_s < after), None)
        lost = [at_s for other, at_s in self.losses if other == replica]
        near = [] if at is None else gaps[max(at - 1, 0) : at + 2]
        return [after - before for before, after in near if not any(before <= at_s < after for at_s in lost)]


def figures(bench: Bench, options: RunOptions = OPTIONS, every: int = EVERY) -> list[Figure]:
    """Ours, then torchft with each of its settings, where it is installed."""
    losses = range(every // 2, options.iterations - every // 2, every)
    run = bench.run(options, *(f"kill:rank={number % options.ranks},at={at}" for number, at in enumerate(losses)))
    found = [done("beside torchft: ours", [run]), *_figures("ours", timeline_of(run))]
    try:
        about = f"torchft {version('torchft')}"
    except PackageNotFoundError:
        return [*found, figure("beside torchft: torchft", None, "", better="lower", note="pip install torchft, then again")]
    step_s = timeline_of(run).usual_s
    for join_ms in bench.steps(about, JOIN_TIMEOUTS_MS):
        out = bench.store.root / f"torchft-{join_ms}"
        out.mkdir(parents=True)
        job = TorchftJob(
            out=str(out), replicas=options.dp, steps=options.iterations, every=every, step_s=step_s, join_timeout_ms=join_ms
        )
        command = [sys.executable, "-m", "unskew.benchmarks.recovery.torchft_job", msgspec.json.encode(job).decode()]
        with (out / "log").open("ab") as log:
            subprocess.run(command, stdout=log, stderr=log, timeout=_END_S, check=True)
        name = f"{about}, join time-out {join_ms / 1000:g} s"
        found += _figures(name, timeline(job.replicas, attempts(out), kills(out)))
    return found


def _figures(name: str, seen: LossTimeline) -> list[Figure]:
    what, usual = f"beside torchft: {name}", f"a step takes {seen.usual_s:.2f} s"
    lost, back = seen.stalls(back=False), seen.stalls(back=True)
    return [
        figure(f"{what}: a kill stalls the others by, median", _median(lost), "s", better="lower", note=_spread(lost, usual)),
        figure(f"{what}: a return stalls the others by, median", _median(back), "s", better="lower", note=_spread(back, usual)),
        figure(
            f"{what}: samples not trained", 100 * seen.untrained / max(seen.samples, 1), "%", better="lower",
            note=f"{seen.untrained} of {seen.samples}",
        ),
        figure(
            f"{what}: tries at a step that are committed", 100 * seen.committed / max(seen.tries, 1), "%", better="higher",
            note=f"{seen.committed} of {seen.tries}",
        ),
    ]  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _spread(values: Sequence[float], usual: str) -> str:
    return f"longest {max(values):.2f} s of {len(values)}; {usual}" if values else usual


def timeline(replicas: int, tried: Iterable[Attempt], killed: Iterable[ReplicaKill]) -> LossTimeline:
    """torchft's, from the first step on in which all took part; its samples are a replica's batches."""
    tried = list(tried)
    whole = min((one.step for one in tried if one.committed and one.replicas == replicas), default=0)
    seen = [one for one in tried if one.step >= whole]
    members = {one.step: one.replicas for one in seen if one.committed}
    commits: dict[int, list[float]] = {}
    for one in seen:
        if one.committed:
            commits.setdefault(one.replica, []).append(one.ended_s)
    return LossTimeline(
        commits=commits,
        losses=[(one.replica, one.at_s) for one in killed],
        samples=replicas * len(members),
        untrained=sum(replicas - count for count in members.values()),
        tries=len(seen),
        committed=sum(one.committed for one in seen),
    )


def timeline_of(run: FinishedRun) -> LossTimeline:
    """Ours, from its log; a try is an iteration's attempt, of which what is kept is not lost."""
    commits: dict[int, list[float]] = {}
    for event in sorted(run.of(IterationCommitted), key=lambda event: event.iteration):
        commits.setdefault(event.rank, []).append((event.start_us + event.wall_us) / 1e6)
    query = """select count(distinct (iteration, micro_batch)) as trained, count(distinct (iteration, attempt)) as tries
        from chunks where run = ?"""
    with open_store(Store(Path(run.options.store or ""))) as reader:
        (found,) = reader.sql(query, [run.summary.run_id]).to_dicts()
    samples = run.options.iterations * run.options.micro_batches
    return LossTimeline(
        commits=commits,
        losses=[(event.rank, event.detected_us / 1e6) for event in run.of(DeviceLost)],
        samples=samples,
        untrained=samples - found["trained"],
        tries=found["tries"],
        committed=len(run.summary.losses),
    )
