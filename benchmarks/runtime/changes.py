"""After each kind of change on the sleeping device: is the iteration predicted as it is, and as short as it could be?

What the surviving speed would allow is the iteration before the fault, shared by devices whose speeds add up to what is left.
Layers, heads and micro-batches are whole, and a shorter or deeper pipeline has other bubbles: so a plan can fall short of it.
Around a slow member of a group no plan of two stages a replica has more than 94.6 % (docs/research/benchmarks.md); one of a
single stage can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from unskew.benchmarks.loop.slow import share_of_the_possible
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench
from unskew.collector.events import IterationJudged, PlanApplied
from unskew.runtime.options import RunOptions

OPTIONS = msgspec.structs.replace(EIGHT_RANKS, device="sleep", iterations=70)
AT, LATER, LAST = 14, 34, 10
GROUPS = {"tp": 2, "pp": 2, "heads": 4, "dim": 32, "tokens": 512, "profile": "long-context", "iterations": 50}
"""With long chunks, for every member executes all operations of its layers: of the others' chunks two cores cannot carry eight
such ranks as fast as the device is."""
SEARCHED = {"schedule": "searched", "tokens": 512, "iterations": 60}
"""With longer chunks: split passes and lent layers are small ones, and each has messages of its own."""
RETURNS = {"respawns": 1, "iterations": 110}
"""A process takes seconds to start."""


class ChangeScenario(msgspec.Struct, frozen=True, kw_only=True):
    """`surviving`: what the speeds of the eight ranks add up to in the end; `changes`: of the run's options."""

    name: str
    faults: tuple[str, ...]
    surviving: float
    changes: Mapping[str, Any] = {}


SCENARIOS = (
    ChangeScenario(name="a slow rank", faults=(f"slow:rank=1,factor=2,at={AT}",), surviving=7.5),
    ChangeScenario(
        name="a slow stage", faults=(f"slow:rank=1,factor=2,at={AT}", f"slow:rank=5,factor=2,at={AT}"), surviving=7
    ),
    ChangeScenario(
        name="two slow ranks", faults=(f"slow:rank=1,factor=2,at={AT}", f"slow:rank=6,factor=1.5,at={AT}"),
        surviving=6 + 0.5 + 2 / 3,
    ),
    ChangeScenario(name="a slow rank that heals", faults=(f"slow:rank=1,factor=2,at={AT},until={LATER}",), surviving=8),
    ChangeScenario(name="a death", faults=(f"kill:rank=1,at={AT}",), surviving=7),
    ChangeScenario(name="a death and a return", faults=(f"kill:rank=1,at={AT}",), surviving=8, changes=RETURNS),
    ChangeScenario(
        name="a death, then a slow rank", faults=(f"kill:rank=1,at={AT}", f"slow:rank=6,factor=2,at={LATER}"), surviving=6.5
    ),
    ChangeScenario(
        name="a slow rank, links that cost", faults=(f"slow:rank=1,factor=2,at={AT}",), surviving=7.5,
        changes={"link_us": 1_000, "link_mbps": 50},
    ),
    ChangeScenario(
        name="a slow rank, split backward passes", faults=(f"slow:rank=1,factor=2,at={AT}",), surviving=7.5,
        changes={"schedule": "zb-h1"},
    ),
    ChangeScenario(
        name="a slow rank, searched orders", faults=(f"slow:rank=1,factor=2,at={AT}",), surviving=7.5,
        changes=SEARCHED,
    ),
    ChangeScenario(
        name="a slow member of a group", faults=(f"slow:rank=2,factor=2,at={AT}",), surviving=7.5, changes=GROUPS
    ),
    ChangeScenario(name="a death in a group", faults=(f"kill:rank=5,at={AT}",), surviving=7, changes=GROUPS),
)  # fmt: skip


def figures(bench: Bench, scenarios: Sequence[ChangeScenario] = SCENARIOS, base: RunOptions = OPTIONS) -> Iterator[Figure]:
    """Of each scenario the error of the last iterations' prediction, and the throughput."""
    for one in bench.steps(f"changes of plan, {base.device} device", scenarios):
        run = bench.run(msgspec.structs.replace(base, **one.changes), *one.faults)
        ends = run.options.iterations - LAST
        judged = [event for event in run.of(IterationJudged) if event.iteration >= ends and event.predicted_us is not None]
        errors = [100 * abs((event.predicted_us or 0) / event.measured_us - 1) for event in judged]
        plans = f"{len(run.of(PlanApplied)) - 1} changes of plan"
        yield figure(
            f"{one.name}: predicted against measured iteration, median error", median(errors) if errors else None, "%",
            bar=3.0, better="lower",
            note=run.failure or f"{len(errors)} iterations, worst {max(errors, default=0.0):.1f} %; {plans}",
        )  # fmt: skip
        share = share_of_the_possible(run, AT, one.surviving)
        yield figure(
            f"{one.name}: throughput, of what the surviving speed allows", None if share is None else 100 * share, "%",
            bar=95.0, better="higher", note=run.failure or f"speeds of {one.surviving:.3g} of 8 ranks",
        )  # fmt: skip
