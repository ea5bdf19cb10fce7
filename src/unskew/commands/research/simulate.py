"""`unskew simulate`: a job, a policy and faults on a cluster that nobody has to own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.commands.common import JsonOption, checking_input, fail, known_run, locate, refuse, write_json

if TYPE_CHECKING:
    from unskew.analytics.cluster.job import Job
    from unskew.analytics.lab.simulator.outcome import SimulationOutcome
    from unskew.analytics.policies.base import Policy


_MOST_HOURS = 100_000
_LEAST_CHECKPOINT_S = 1.0


def simulate(
    cluster: Annotated[str, typer.Option(metavar="SPEC", help="The job: a preset, or PRESET,dp=8,pp=4.")] = "llama2-13b",
    policy: Annotated[str, typer.Option(metavar="NAMES", help="One policy, or several with commas.")] = "unskew",
    faults: Annotated[
        str, typer.Option(metavar="SPEC", help="healthy, a published rate, key=value pairs, or trace:FILE.")
    ] = "llama3",
    hours: Annotated[float, typer.Option(help="Simulated time.")] = 24.0,
    seed: Annotated[int, typer.Option(help="Seed of faults and noise.")] = 0,
    spares: Annotated[int, typer.Option(help="Spare nodes, for policies that use them.")] = 0,
    checkpoint_s: Annotated[
        float | None,
        typer.Option(
            "--checkpoint-s",
            metavar="SECONDS",
            help="Time between checkpoints.",
            show_default="1800, where a policy writes any",
        ),
    ] = None,
    check: Annotated[
        str | None, typer.Option(metavar="RUN", help="Instead: play a real run's plans, predicted against measured.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="DIR", help="Keep the simulated run in this store.", show_default="not kept"),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Simulate a job with faults under one or more policies: effective training time, and where the rest of the time went."""
    if check is not None:
        _check(check, store, json)
        return
    from unskew.analytics.lab.simulator.arrivals import arrivals
    from unskew.analytics.lab.simulator.simulation import SimulationOptions
    from unskew.analytics.lab.simulator.simulation import simulate as play
    from unskew.analytics.lab.simulator.specs import parse_cluster, parse_faults
    from unskew.analytics.policies.registry import policy as policy_named
    from unskew.edge.failure_trace import load_trace

    if not 0 < hours <= _MOST_HOURS:
        refuse(f"--hours {hours:g} must be greater than 0 and at most {_MOST_HOURS:,}")
    if spares < 0 or seed < 0:
        refuse("--spares and --seed must be at least 0")
    if checkpoint_s is not None and not _LEAST_CHECKPOINT_S <= checkpoint_s <= hours * 3600.0:
        refuse(f"--checkpoint-s {checkpoint_s:g} must be from {_LEAST_CHECKPOINT_S:g} to the {hours * 3600.0:g} s simulated")
    with checking_input("--cluster"):
        job = parse_cluster(cluster)
    with checking_input("--policy"):
        chosen = [policy_named(name) for name in policy.split(",")]
    _refuse_too_large(chosen, job)
    if checkpoint_s is not None:
        _refuse_without_checkpoints(chosen)
    if spares:
        _refuse_without_spares(chosen)
    with checking_input("--faults"):
        if faults.startswith("trace:"):
            cluster_events = load_trace(Path(faults.removeprefix("trace:")), job, hours=hours)
        else:
            cluster_events = arrivals(job, parse_faults(faults), hours=hours, seed=seed)
    place = locate(store) if store is not None else None
    if place is not None:
        place.enter()
    answers: list[dict[str, Any]] = []
    outcomes: list[SimulationOutcome] = []
    for one in chosen:
        outcome = play(
            job, one, cluster_events, SimulationOptions(hours=hours, seed=seed, spares=spares, checkpoint_s=checkpoint_s)
        )
        answer: dict[str, Any] = dict(outcome.facts())
        if place is not None:
            from unskew.collector.paths import StoreError
            from unskew.edge.record_simulation import record

            run = f"{time.strftime('%Y%m%d-%H%M%S')}-sim-{one.name}-{time.time_ns() % 10**6:06d}"
            asked = {"cluster": cluster, "policy": one.name, "faults": faults, "hours": hours, "seed": seed, "spares": spares,
                     "checkpoint_s": outcome.checkpoint_s}  # fmt: skip
            try:
                record(place, run, outcome, cluster_events, asked)
            except StoreError as error:
                fail(str(error))
            answer["run_id"] = run
        answers.append(answer)
        outcomes.append(outcome)
    _print(outcomes, [answer["run_id"] for answer in answers if "run_id" in answer])
    write_json(json, {"cluster": cluster, "faults": faults, "hours": hours, "seed": seed, "policies": answers})


def _refuse_too_large(chosen: Sequence[Policy], job: Job) -> None:
    for one in chosen:
        if one.most_devices is not None and job.devices > one.most_devices:
            refuse(
                f"--policy {one.name} plans rank by rank, for at most {one.most_devices:,} GPUs, not for {job.devices:,}; "
                "--policy joint plans for more"
            )


def _refuse_without_checkpoints(chosen: Sequence[Policy]) -> None:
    if all(one.checkpoint_s is None for one in chosen):
        refuse(f"--checkpoint-s: {', '.join(one.name for one in chosen)} writes no checkpoints")


def _refuse_without_spares(chosen: Sequence[Policy]) -> None:
    from unskew.analytics.policies.registry import POLICIES

    if idle := [one.name for one in chosen if not one.takes_spares]:
        able = ", ".join(name for name, build in POLICIES.items() if build().takes_spares)
        refuse(f"--spares: {', '.join(idle)} uses no spare nodes, allowed: {able}")


def _print(outcomes: Sequence[SimulationOutcome], runs: Sequence[str]) -> None:
    """A column for each policy; as many tables as the width asks for."""
    from rich.table import Table

    from unskew.terminal.console import SafeConsole

    console, job = SafeConsole(), outcomes[0].job
    title = f"{job.name} · {job.devices:,} GPUs · {outcomes[0].whole_s / 3600.0:g} h"
    facts = [_facts(outcome) for outcome in outcomes]
    widths = [max(map(len, (outcome.policy, *one.values()))) for one, outcome in zip(facts, outcomes, strict=True)]
    for part in _beside(widths, console.width - max(map(len, facts[0])) - 4):
        grid = Table("", title=title, title_justify="left")
        for number in part:
            grid.add_column(outcomes[number].policy, justify="right", no_wrap=True)
        for name in facts[0]:
            grid.add_row(name, *(facts[number][name] for number in part), end_section=name == _LAST_FACT)
        console.print(grid)
    print("unexplained: the noise of iterations; below 0 they took less time than the model has them take")
    for outcome in outcomes:
        if outcome.aborted_s is not None:
            print(f"{outcome.policy} ended after {outcome.aborted_s / 3600:.2f} h: {outcome.changes[-1].reaction.reason}")
    for run in runs:
        print(f"run {run}")


def _beside(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns of these widths, as many side by side as have room, one at least."""
    parts: list[list[int]] = []
    left = 0
    for number, width in enumerate(widths):
        if not parts or left < width + 3:
            parts.append([])
            left = room
        parts[-1].append(number)
        left -= width + 3
    return parts


_LAST_FACT = "failures · changes of plan"


def _facts(outcome: SimulationOutcome) -> dict[str, str]:
    def share(part: float) -> str:
        return f"{round(100 * part, 2) + 0.0:.2f} %"

    lost = {f"lost: {cause}": share(seconds / outcome.whole_s) for cause, seconds in outcome.lost_s.items()}
    return {
        "effective training time": share(outcome.effective), "surviving capacity": share(outcome.capacity),
        "iterations": f"{outcome.iterations:,}", "samples/s": f"{outcome.samples_per_s:.3f}",
        "tokens": f"{outcome.tokens:.4g}", "MFU": f"{100 * outcome.mfu:.1f} %",
        "checkpoints": "none" if outcome.checkpoint_s is None else f"every {outcome.checkpoint_s:,g} s",
        _LAST_FACT: f"{outcome.failures} · {len(outcome.changes)}", **lost,
        "unexplained": share(outcome.unexplained_s / outcome.whole_s),
    }  # fmt: skip


def _check(run: str, store: str | None, json: Path | None) -> None:
    from rich.table import Table

    from unskew.analytics.lab.simulator.check import CheckError, check_run
    from unskew.collector.read.reader import open_store
    from unskew.terminal.console import SafeConsole

    place = locate(store)
    known_run(place, run)
    with open_store(place) as reader:
        try:
            checked = check_run(reader.sql, run)
        except CheckError as error:
            fail(str(error))
    grid = Table("plan", "from", "compared", "redone", "predicted s", "measured s", "mean error", title=f"run {run}")
    for one in checked:
        found = ("", "", "")
        if one.predicted_s is not None:
            found = (f"{one.predicted_s:.4f}", f"{one.measured_s:.4f}", f"{one.error_percent:.1f} %")
        grid.add_row(str(one.plan_version), str(one.from_iteration), str(one.n), str(one.redone), *found)
    SafeConsole().print(grid)
    if any(one.redone for one in checked):
        print("redone: begun again after a loss; their time holds what was thrown away, so they are not compared")
    write_json(json, {"run": run, "plans": checked})
