"""`unskew replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.commands.common import JsonOption, StoreOption, checking_input, fail, known_run, locate, warn, write_json
from unskew.terminal.safe_text import harmless

if TYPE_CHECKING:
    from unskew.analytics.replay.replay import Replay

SHOWN = 10


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Which run.", show_default=False)],
    until: Annotated[
        int | None, typer.Option("--until", metavar="ITERATION", min=0, help="Up to this iteration.", show_default="the last")
    ] = None,
    json: JsonOption = None,
    store: StoreOption = None,
) -> None:
    """Rebuild health, plan and proposals at any moment from the log, and compare every decision with the recorded one."""
    from unskew.analytics.diagnosis.imported import until as diagnosed
    from unskew.analytics.replay.replay import replay as decide_again
    from unskew.collector.read.reader import open_store
    from unskew.edge.load_run import is_imported, load_run
    from unskew.edge.recorded_run import recorded_run

    place = locate(store)
    known_run(place, run)
    with checking_input(), open_store(place) as reader:
        warn(reader.problems)
        imported = is_imported(reader, run)
        replayed = diagnosed(load_run(reader, run), until) if imported else decide_again(recorded_run(reader, run), until)
    write_json(json, facts(replayed))
    for line in sentences(replayed):
        print(harmless(line))
    if imported:
        print("imported: nothing was decided while it ran; the verdicts are those of diagnose, on what had been seen by then")
    if replayed.differences:
        if not replayed.same_code:
            print("the run was decided by another version of the code, which may differ for that reason:")
        for difference in replayed.differences[:SHOWN]:
            print(harmless(f"  {difference.sentence}"))
        more = len(replayed.differences) - SHOWN
        fail(
            f"{len(replayed.differences)} of {replayed.compared} recorded decisions are not as the log leads to now"
            + (f" ({more} more in --json)" if more > 0 else "")
        )


def sentences(replayed: Replay) -> list[str]:
    """The state of the moment, a line each."""
    plan = replayed.plan
    lines = [
        f"run {replayed.run} after iteration {replayed.until}",
        f"plan {plan.plan_version} ({plan.digest}) of {len(plan.roles)} ranks in force",
        f"alive: {', '.join(map(str, replayed.alive))}",
    ]
    fitted = replayed.predictor
    lines.append(
        "no predictor yet" if fitted is None else f"predictor {fitted.predictor}, fitted after iteration {fitted.watermark}"
    )
    for rank, kinds in sorted(replayed.speeds.items()):
        lines.append(f"rank {rank} at speed " + ", ".join(f"{kind} {speed:.2f}" for kind, speed in sorted(kinds.items())))
    lines += [f"verdict {verdict.verdict} open: {verdict.sentence}" for verdict in replayed.verdicts]
    for proposal in replayed.proposals:
        gain = "" if proposal.gain_percent is None else f", gain {proposal.gain_percent:.1f} %"
        lines.append(f"proposal {proposal.proposal} {proposal.status}{gain}: {proposal.change}")
    lines.append(f"{replayed.compared} recorded decisions compared, {len(replayed.differences)} different")
    return lines


def facts(replayed: Replay) -> dict[str, Any]:
    """What the screen shows, as plain data."""
    import msgspec

    plan = replayed.plan
    return {
        "run_id": replayed.run,
        "until": replayed.until,
        "plan": {"epoch": plan.plan_version, "digest": plan.digest, "plan": plan.to_data()},
        "alive": list(replayed.alive),
        "health": [{"rank": rank, "speed": replayed.speeds.get(rank, {})} for rank in replayed.alive],
        "verdicts": [msgspec.to_builtins(verdict) for verdict in replayed.verdicts],
        "predictor": None if replayed.predictor is None else msgspec.to_builtins(replayed.predictor),
        "proposals": [msgspec.to_builtins(proposal) for proposal in replayed.proposals],
        "same_code": replayed.same_code,
        "compared": replayed.compared,
        "differences": [
            {**msgspec.to_builtins(difference), "sentence": difference.sentence} for difference in replayed.differences
        ],
    }
