"""`unskew simulate`: a job, a policy and faults on a cluster that nobody has to own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.commands.common import JsonOption, checking_input, fail, known_run, locate, refuse, write_json

if TYPE_CHECKING:
    from unskew.analytics.cluster.simulation import Outcome


def simulate(
    cluster: Annotated[str, typer.Option(metavar="SPEC", help="The job: a preset, or PRESET,dp=8,pp=4.")] = "llama2-13b",
    policy: Annotated[str, typer.Option(metavar="NAMES", help="One policy, or several with commas.")] = "unskew",
    faults: Annotated[
        str, typer.Option(metavar="SPEC", help="healthy, a published rate, key=value pairs, or trace:FILE.")
    ] = "llama3",
    hours: Annotated[float, typer.Option(help="Simulated time.")] = 24.0,
    seed: Annotated[int, typer.Option(help="Seed of faults and noise.")] = 0,
    spares: Annotated[int, typer.Option(help="Spare nodes.")] = 0,
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
    from unskew.analytics.cluster.arrivals import arrivals
    from unskew.analytics.cluster.simulation import Options
    from unskew.analytics.cluster.simulation import simulate as play
    from unskew.analytics.cluster.specs import parse_cluster, parse_faults
    from unskew.analytics.cluster.traces import load_trace
    from unskew.analytics.policies.registry import policy as policy_named

    if not 0 < hours < float("inf"):
        refuse(f"--hours {hours:g} must be greater than 0")
    if spares < 0 or seed < 0:
        refuse("--spares and --seed must be at least 0")
    with checking_input():
        job = parse_cluster(cluster)
        chosen = [policy_named(name) for name in policy.split(",")]
        if faults.startswith("trace:"):
            happenings = load_trace(Path(faults.removeprefix("trace:")), job, hours=hours)
        else:
            happenings = arrivals(job, parse_faults(faults), hours=hours, seed=seed)
    place = locate(store) if store is not None else None
    answers: list[dict[str, Any]] = []
    for one in chosen:
        outcome = play(job, one, happenings, Options(hours=hours, seed=seed, spares=spares))
        answer: dict[str, Any] = dict(outcome.facts())
        if place is not None:
            from unskew.analytics.cluster.record import record
            from unskew.collector.paths import StoreError

            run = f"{time.strftime('%Y%m%d-%H%M%S')}-sim-{one.name}-{time.time_ns() % 10**6:06d}"
            asked = {"cluster": cluster, "policy": one.name, "faults": faults, "hours": hours, "seed": seed, "spares": spares}
            try:
                record(place, run, outcome, happenings, asked)
            except StoreError as error:
                fail(str(error))
            answer["run_id"] = run
        answers.append(answer)
        _print(outcome, answer.get("run_id"))
    write_json(json, {"cluster": cluster, "faults": faults, "hours": hours, "seed": seed, "policies": answers})


def _print(outcome: Outcome, run: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    job = outcome.job
    grid = Table("", title=f"{job.name} · {job.devices:,} GPUs · {outcome.policy}", title_justify="left", show_header=False)
    grid.add_column(justify="right")
    grid.add_row("effective training time", f"{100 * outcome.effective:.2f} %")
    grid.add_row("surviving capacity", f"{100 * outcome.capacity:.2f} %")
    grid.add_row("iterations", f"{outcome.iterations:,}")
    grid.add_row("samples/s", f"{outcome.samples_per_s:.3f}")
    grid.add_row("tokens", f"{outcome.tokens:.4g}")
    grid.add_row("MFU", f"{100 * outcome.mfu:.1f} %")
    grid.add_row("failures · changes of plan", f"{outcome.failures} · {len(outcome.changes)}")
    if outcome.aborted_s is not None:
        grid.add_row("[red]ended after[/]", f"{outcome.aborted_s / 3600:.2f} h: {outcome.changes[-1].reaction.reason}")
    grid.add_section()
    for cause, seconds in (*outcome.lost_s.items(), ("unexplained", outcome.unexplained_s)):
        grid.add_row(f"lost: {cause}" if cause != "unexplained" else cause, f"{100 * seconds / outcome.whole_s:.2f} %")
    Console().print(grid)
    if run is not None:
        print(f"run {run}")


def _check(run: str, store: str | None, json: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from unskew.analytics.cluster.check import CheckError, check_run
    from unskew.collector.reader import open_store

    place = locate(store)
    known_run(place, run)
    with open_store(place) as reader:
        try:
            checked = check_run(reader.sql, run)
        except CheckError as error:
            fail(str(error))
    grid = Table("plan", "from iteration", "iterations", "predicted s", "measured s", "mean error", title=f"run {run}")
    for one in checked:
        grid.add_row(
            str(one.epoch), str(one.from_iteration), str(one.n), f"{one.predicted_s:.4f}", f"{one.measured_s:.4f}",
            f"{one.error_percent:.1f} %",
        )  # fmt: skip
    Console().print(grid)
    write_json(json, {"run": run, "plans": checked})
