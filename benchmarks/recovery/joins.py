"""What the others pay for a rank that comes back, for one that hangs, for checkpoints; whether healthy ranks are left alone.

The sleeping device, so that a chunk takes its time although ranks share cores.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import msgspec

from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun, done, loss_difference
from unskew.collector.events import CheckpointSaved, DeviceLost, PlanApplied, RankAdded, Regrouped
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.runtime.options import RunOptions

OPTIONS = msgspec.structs.replace(EIGHT_RANKS, device="sleep", dtype="float64", iterations=40, respawns=3)
AT = 12
KILLED, PAUSED, HANGING = (2, 5), ((1, 0.5), (6, 1.5)), (3, 4)
"""Ranks of a run each, and for how many seconds they are stopped."""
QUIET_S, ALL_QUIET_S = 60.0, 600.0
_END_S = 60.0
SIXTY_FOUR = RunOptions(device="sleep", pp=8, dp=8, layers=8, micro_batches=32, dim=8, heads=1, tokens=64, iterations=100_000)


def figures(bench: Bench, options: RunOptions = OPTIONS) -> list[Figure]:
    """A failure-free reference, then each kind of loss."""
    reference = bench.run(options)
    killed = [bench.run(options, f"kill:rank={rank},at={AT}") for rank in bench.steps("ranks that come back", KILLED)]
    paused = [
        bench.run(options, f"freeze:rank={rank},at={AT},seconds={seconds:g}")
        for rank, seconds in bench.steps("ranks that are stopped for a moment", PAUSED)
    ]
    hung = [bench.run(options, f"hang:rank={rank},at={AT}") for rank in bench.steps("ranks that hang", HANGING)]
    runs = [*killed, *paused, *hung]
    still = [found for run in (*killed, *paused, *hung) if (found := stood_still(run)) is not None]
    excised = [seconds for run in hung if (seconds := excised_s(run)) is not None]
    spared = [run for run in paused if not run.of(RankAdded) and came_back(run)]
    how = f"{options.ranks} ranks, {options.iterations} iterations each, sleeping device"
    return [
        done("joins", runs, how),
        figure(
            "joins: largest difference of any iteration's loss, float64",
            max(loss_difference(run, reference.summary.losses) for run in runs), "nats", bar=1e-8, better="lower",
            note="against the failure-free run of the same seed",
        ),
        figure(
            "joins: ranks that had work again before the end", len(still), "", bar=len(runs), better="higher",
        ),
        figure(
            "joins: how long the others stand still for one, longest", max(still, default=None), "iterations", bar=1,
            better="lower", note=f"median {median(still):.2f} of {len(still)}" if still else "",
        ),
        figure(
            "joins: ranks stopped for 0.5 and 1.5 s that came back as the processes they were", len(spared), "",
            bar=len(paused), better="higher",
        ),
        figure(
            "hang: from the hang until the others have regrouped without it, longest", max(excised, default=None), "s", bar=1.5,
            better="lower", note=f"{len(excised)} of {len(hung)} excised",
        ),
        checkpoint_cost([reference, *runs]),
    ]  # fmt: skip


def came_back(run: FinishedRun) -> bool:
    """Whether the last plan has every rank."""
    return len(run.of(PlanApplied)[-1].plan["roles"]) == run.options.ranks


def stood_still(run: FinishedRun) -> float | None:
    """How many median iterations the others stood still for the change of plan that brought a rank back; None: it did not
    come."""
    if not came_back(run):
        return None
    losses = run.events.index(run.of(DeviceLost)[-1]) if run.of(DeviceLost) else 0
    plans = {event.plan_version: len(event.plan["roles"]) for event in run.of(PlanApplied)}
    after = [event for event in run.events[losses:] if isinstance(event, Regrouped)]
    joins = [event.seconds for event in after if plans.get(event.plan_version) == run.options.ranks]
    return joins[0] / median(run.summary.iteration_s) if joins else None


def excised_s(run: FinishedRun) -> float | None:
    """From the moment that a rank announced its fault until the survivors had regrouped."""
    query = """select (select min(at_us) from events where run = $run and type ^@ 'regrouped' and at_us > f.announced_us)
        - f.announced_us as us from faults f where run = $run"""
    with open_store(Store.locate(run.options.store)) as reader:
        (us,) = reader.sql(query, {"run": run.summary.run_id})["us"]
    return None if us is None else us / 1e6


def checkpoint_cost(runs: Sequence[FinishedRun]) -> Figure:
    """How long training stood still for checkpoints, of all its time."""
    shares = []
    for run in runs:
        for saved in run.of(CheckpointSaved):
            if saved.iterations < run.options.iterations:  # the last one is waited for
                shares.append(saved.paused_us / 1e6 / (run.options.checkpoint_every * median(run.summary.iteration_s)))
    every = runs[0].options.checkpoint_every
    return figure(
        f"checkpoints: time that training stands still, of an iteration, one every {every}",
        100 * max(shares) if shares else None, "%", bar=1, better="lower",
        note=f"the most of {len(shares)}, of the rank that took longest; median {100 * median(shares):.2g} %" if shares else "",
    )  # fmt: skip


def figures_of_quiet_ranks(bench: Bench, options: RunOptions = SIXTY_FOUR) -> list[Figure]:
    """Many healthy ranks without any privilege: who is called lost is called so wrongly."""
    seconds = ALL_QUIET_S if bench.full else QUIET_S
    found = []
    for name, before in bench.steps(f"{options.ranks} healthy ranks, {seconds:.0f} s each", list(UNPRIVILEGED.items())):
        if shutil.which(before[0]) is None or os.geteuid() != 0:
            found.append(figure(f"quiet: {name}", None, "", bar=0, better="lower", note=f"{before[0]} or root is missing"))
            continue
        found.append(_quiet(bench.store, options, name, before, seconds))
    return found


UNPRIVILEGED = {
    "healthy ranks called lost, without CAP_SYS_NICE": ("setpriv", "--bounding-set=-all", "--inh-caps=-all"),
    "healthy ranks called lost, without CAP_SYS_NICE and niced by 10": (
        "setpriv", "--bounding-set=-all", "--inh-caps=-all", "nice", "-n", "10",
    ),
}  # fmt: skip


def _quiet(store: Store, options: RunOptions, name: str, before: Sequence[str], seconds: float) -> Figure:
    known = set(store.spooled_runs())
    layout = f"--pp {options.pp} --dp {options.dp} --layers {options.layers} --micro-batches {options.micro_batches}"
    sizes = f"--dim {options.dim} --heads {options.heads} --tokens {options.tokens} --iterations {options.iterations}"
    asked = f"run --no-dashboard --no-faults --device sleep --checkpoint-every 0 {layout} {sizes}".split()
    command = [*before, sys.executable, "-P", "-m", "unskew", *asked, "--store", str(store.root)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    ended = process.poll()
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:  # niced on a busy machine it may find no core; its ranks end with it
        process.kill()
        process.wait()
    (run,) = set(store.spooled_runs()) - known or {""}
    query = """select count(*) filter (type ^@ 'suspected' or type ^@ 'device_lost') as named,
        max((payload->>'longest_gap_us')::bigint) filter (type ^@ 'heartbeat') / 1e6 as gap from events where run = ?"""
    with open_store(store) as reader:
        ((named, gap),) = reader.sql(query, [run]).rows()
        (iterations,) = reader.sql("select count(*) as n from iterations where run = ?", [run])["n"]
    note = (
        f"{options.ranks} ranks, {seconds / 60:.0f} min, {iterations} iterations, load {os.getloadavg()[0]:.0f}; longest pause "
    )
    note += f"between two heartbeats of a rank {gap or 0:.2f} s" + (f"; it ended with {ended}" if ended is not None else "")
    return figure(f"quiet: {name}", None if not iterations else named, "", bar=0, better="lower", note=note)
