"""Verdicts on causes that no single device has: unequal batches, unequal stages, pauses (docs/reference/verdicts/).

A cause is named when it costs at least `LEAST_SHARE` of the time of the iterations and at least half of what the costliest
costs; what the others cost is in the time lost. Unequal stages are named only under the plan that the run began with: a
later plan is uneven because it answers a slow or a dead device, and to even it out would undo that. Where the workload was
inferred from peers, unequal lengths are named only when forward and backward times of micro-batches move together (correlation
>= 0.9, ByteDance's rule), and with doubt where one replica always has least to do: the others may be slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from unskew.analytics.core.outcome import times_as_long
from unskew.analytics.detector.next_steps import NEXT_STEP
from unskew.analytics.diagnosis.ranks.heaviest import heaviest, is_one_light
from unskew.analytics.diagnosis.ranks.replicas import NEXT_STEP as NEXT_STEP_OF_REPLICA
from unskew.analytics.diagnosis.trace.lost import LostTime
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.collector.events import Cause, Party, Verdict

LEAST_SHARE = 0.05
LEAST_OF_COSTLIEST = 0.5
LEAST_CORRELATION = 0.9
OR_OFTEN_LONGER = "it is slow now and then, or its documents are longer; which of the two, the log does not show"


def named(
    sections: Sequence[tuple[TraceSection, LostTime]], first_number: int, config: str, fast: Sequence[str] = ()
) -> list[Verdict]:
    """The verdicts on all sections together, the costliest cause first. `fast`: who takes much less than its peers."""
    total = sum(float(lost.measured_us.sum()) for _, lost in sections)
    chosen = {
        cause: [(section, lost) for section, lost in sections if _counts(cause, section)]
        for cause in ("long_sequences", "stage_imbalance", "input_bound", "gc_pause")
    }
    costs = {cause: sum(float(lost.causes[cause].sum()) for _, lost in of) for cause, of in chosen.items()}
    least = max(LEAST_SHARE * total, LEAST_OF_COSTLIEST * max(costs.values(), default=0.0))
    found: list[Verdict] = []
    for cause, us in sorted(costs.items(), key=lambda item: -item[1]):
        if us < least or us <= 0 or not _supported(cause, sections):
            continue
        found.append(_verdict(cause, us / total, chosen[cause], first_number + len(found), config, fast=fast))
    return found


def clears_all(verdict: Verdict) -> bool:
    """Whether a verdict says that time is lost and nothing is wrong: by the lengths that the log has, the data is unequal."""
    return verdict.cause == "long_sequences" and verdict.evidence.get("lengths") == "logged"


def faults(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Those that say that something is wrong."""
    return [one for one in verdicts if not clears_all(one)]


def _counts(cause: str, section: TraceSection) -> bool:
    """Whether what a section shows of a cause is not what its plan meant."""
    if cause == "stage_imbalance":
        return section.plan_version == 0
    return cause != "long_sequences" or not section.uneven


def _supported(cause: str, sections: Sequence[tuple[TraceSection, LostTime]]) -> bool:
    """Whether lengths, where they were inferred, are really what micro-batches differ in."""
    if cause != "long_sequences":
        return True
    return all(section.lengths_logged or (section.correlation or 0.0) >= LEAST_CORRELATION for section, _ in sections)


def _verdict(
    cause: str,
    share: float,
    sections: Sequence[tuple[TraceSection, LostTime]],
    number: int,
    config: str,
    *,
    fast: Sequence[str],
) -> Verdict:
    iterations = [i for section, _ in sections for i in section.recording.iterations]
    shares = np.concatenate([lost.causes[cause] / lost.measured_us for _, lost in sections])
    evidence: dict[str, object] = {
        "share_of_time": round(share, 4),
        "seconds_per_iteration": round(sum(float(lost.causes[cause].sum()) for _, lost in sections) / 1e6 / len(shares), 4),
        "iterations": len(shares),
        "next_step": NEXT_STEP[cause],
    }
    culprits: tuple[Party, ...] = ()
    sentence, sure = "", True
    if cause == "long_sequences":
        correlations = [section.correlation for section, _ in sections if section.correlation is not None]
        if correlations:
            evidence["forward_backward_correlation"] = round(float(np.mean(correlations)), 4)
        evidence["lengths"] = "logged" if all(section.lengths_logged for section, _ in sections) else "inferred from peers"
        evidence["spread_of_workload"] = {kind: round(cv, 4) for kind, cv in _spread(sections).items()}
        inferred = [(section, lost.causes[cause]) for section, lost in sections if not section.lengths_logged]
        most = heaviest(inferred)
        or_slow = list(fast) if inferred and is_one_light([section for section, _ in inferred]) else []
        cost = f"micro-batches of unequal work cost {100 * share:.1f} % of the time"
        sentence = f"{cost}: long sequences, {_shown_by(sections)}"
        if most is not None and not most.shows:
            sentence = f"{cost}, in so few iterations that long sequences cannot be told from a device that was held up"
            evidence["next_step"] = "log document lengths, and look at what else the devices did in these iterations"
        elif most is not None and most.is_outlier:
            who = f"replica {most.replica} (rank{'s' * (len(most.ranks) > 1)} {', '.join(map(str, most.ranks))})"
            sentence = f"{cost}, {100 * most.share:.0f} % of it where {who} has the most: {OR_OFTEN_LONGER}"
            evidence |= {"next_step": NEXT_STEP_OF_REPLICA, "share_of_replica": round(most.share, 4)}
        elif or_slow:
            sentence = f"{cost}: long sequences, or slow replicas, and the log does not show which: {'; '.join(or_slow)}"
            evidence["next_step"] = NEXT_STEP_OF_REPLICA
        sure = not or_slow and (most is None or (most.shows and not most.is_outlier))
    elif cause == "stage_imbalance":
        means = _stage_means(sections)
        costly = max(means, key=lambda stage: means[stage])
        others = [us for stage, us in means.items() if stage != costly]
        ratio = means[costly] / float(np.mean(others))
        culprits = (Party(kind="stage", stage=costly),)
        evidence["mean_us_per_micro_batch"] = {str(stage): round(us) for stage, us in means.items()}
        sentence = f"stage {costly} takes {times_as_long(ratio)} as the others: it costs {100 * share:.1f} % of the time"
        if any(not section.by_model and len(section.replicas) == 1 for section, _ in sections):
            sentence += "; its layers or its device, which one replica does not show"
    else:
        ranks = _paused(cause, sections)
        culprits = tuple(Party(kind="device", rank=rank) for rank in ranks)
        evidence["paused_s"] = {str(rank): round(us / 1e6, 3) for rank, us in ranks.items()}
        what = "waiting for input" if cause == "input_bound" else "collecting garbage"
        sentence = f"{what} on {_ranks(ranks)} costs {100 * share:.1f} % of the time"
    of_cause: dict[str, Cause] = {"long_sequences": "long_sequences", "stage_imbalance": "stage_imbalance",
                                  "input_bound": "input_bound", "gc_pause": "gc_pause"}  # fmt: skip
    return Verdict(
        verdict=number,
        cause=of_cause[cause],
        culprits=culprits,
        since_iteration=min(iterations),
        at_iteration=max(iterations),
        confidence=round(min(float((shares >= LEAST_SHARE).mean()), 1.0 if sure else 0.5), 3),
        sentence=sentence,
        evidence=evidence,
        config=config,
    )


def _shown_by(sections: Sequence[tuple[TraceSection, LostTime]]) -> str:
    """What lengths are known by, and what of replicas is. Whether a device is at fault is for the outcome to say, which knows
    what was seen of them."""
    if all(section.lengths_logged for section, _ in sections):
        return "as they are logged"
    bounds = [section.smallest_replica_slowdown for section, _ in sections if not section.lengths_logged]
    seen = [f"a replica slower by {100 * (bound - 1):.0f} % would show" for bound in bounds if bound is not None]
    return f"as every chunk of theirs shows; {seen[0] if seen else 'a whole replica cannot be told from its data'}"


def _spread(sections: Sequence[tuple[TraceSection, LostTime]]) -> Mapping[str, float]:
    """Kind of work -> coefficient of variation of what its chunks should take, within a stage, mean over stages."""
    found: dict[str, list[float]] = {}
    for section, _ in sections:
        for (kind, _), members in section.cells.items():
            expected = section.expected_us[members]
            found.setdefault(kind, []).append(float(expected.std() / expected.mean()))
    return {kind: float(np.mean(values)) for kind, values in found.items()}


def _stage_means(sections: Sequence[tuple[TraceSection, LostTime]]) -> dict[int, float]:
    """Stage -> mean time of a micro-batch on it, all kinds of work together, on healthy machines (us)."""
    found: dict[int, list[float]] = {}
    for section, lost in sections:
        for stage in section.stages:
            found.setdefault(stage, []).append(
                sum(float(lost.healthy_us[members].mean()) for (_, of), members in section.cells.items() if of == stage)
            )
    return {stage: float(np.mean(values)) for stage, values in sorted(found.items())}


def _ranks(ranks: Collection[int]) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks"


def _paused(cause: str, sections: Sequence[tuple[TraceSection, LostTime]]) -> dict[int, float]:
    """Rank -> how long it paused for that cause (us); ranks that did for less than half as long as another are left out."""
    found: dict[int, float] = {}
    for section, _ in sections:
        operations = section.recording.graph.operations
        us = np.zeros(len(operations))
        if cause in section.recording.pauses_us:
            us += section.recording.pauses_us[cause].sum(axis=1)
        if cause == "gc_pause":
            us += np.where(section.recording.graph.where(kind="gc"), section.parts.work_us.sum(axis=1), 0.0)
        for operation, spent in zip(operations, us, strict=True):
            if spent > 0:
                found[operation.rank] = found.get(operation.rank, 0.0) + float(spent)
    least = LEAST_OF_COSTLIEST * max(found.values(), default=0.0)
    return {rank: us for rank, us in sorted(found.items()) if us >= least}
