"""Imported pipelines without lengths: slow ranks named, healthy ones accused, calm that was not earned."""

from __future__ import annotations

from support.traces.slowed_pipelines import scored, slowed_pipeline

from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

FIRST_SEED = 20_000
"""Apart from those used while it was made, and from the tests'."""


def figures(bench: Bench, pipelines: int = 200) -> list[Figure]:
    """2 to 8 stages, 1 to 4 replicas, up to two slow ranks anywhere: 1.1 to 2 times, any kind of work, any time."""
    of = []
    for seed in bench.steps("imported pipelines", range(FIRST_SEED, FIRST_SEED + pipelines)):
        pipeline = slowed_pipeline(seed)
        of.append((pipeline, scored(pipeline, diagnose(pipeline.log()))))
    found = []
    for name, some, bar in (
        ("two replicas and more", [one for one in of if one[0].replicas > 1], 95.0),
        ("one replica", [one for one in of if one[0].replicas == 1], None),
    ):
        named, missed = (sum(len(getattr(one, which)) for _, one in some) for which in ("named", "missed"))
        unjudged = sum(one.abstained for _, one in some)
        note = f"{named} of {named + missed} in {len(some)} pipelines, of which {unjudged} cannot be judged"
        share = 100 * named / max(named + missed, 1)
        found.append(
            figure(f"pipelines without lengths, {name}: slow ranks named", share, "%", bar=bar, better="higher", note=note)
        )
    for name, count in (
        ("with a healthy rank accused", sum(bool(one.accused) for _, one in of)),
        ("called well above the stated slowdown", sum(one.falsely_calm for _, one in of)),
    ):
        found.append(
            figure(f"pipelines without lengths: {name}", count, "", bar=0, better="lower", note=f"of {len(of)} pipelines")
        )
    return found
