"""The stretches of a run whose chunks are known, and who was slow in them: with the lengths of documents, or without."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unskew.analytics.core.outcome import Findings, percent
from unskew.analytics.detector.options import DetectorOptions, options_for
from unskew.analytics.diagnosis.attached import follow_attached
from unskew.analytics.diagnosis.failslow import as_slow, follow_run
from unskew.analytics.diagnosis.ranks.rank_times import follow_ranks
from unskew.analytics.diagnosis.ranks.replicas import excess_of, judge_replicas, smallest_slowdown
from unskew.analytics.diagnosis.ranks.slow_ranks import follow_section
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.clocks import why_clocks_disagree
from unskew.analytics.diagnosis.trace.replay import GraphError
from unskew.analytics.diagnosis.trace.section import TraceSection, record, with_lengths, without_lengths
from unskew.collector.events import Verdict

NO_PLACES = (
    "stage_imbalance: no messages between ranks and no stages are recorded, so each rank is taken for a replica, and what a "
    "pipeline waits is unexplained"
)
OR_ITS_DATA = "a whole replica that is slow cannot be told from its data"
NO_WEIGHT = (
    "slow_device from the first iterations on, or slow and heavy alike: of one stage without document lengths, data that is "
    "always heavy on a rank looks like a slow device"
)


def sections_of(log: RunLog) -> tuple[list[TraceSection], Findings, list[str]]:
    """The stretches of a run that has chunks, the Detector's findings on them, and what could not be used, a sentence each."""
    return _with_lengths(log) if log.released else _without_lengths(log, options_for(log.device_kind))


def _with_lengths(log: RunLog) -> tuple[list[TraceSection], Findings, list[str]]:
    """Plan by plan: what a chunk should take follows from its lengths."""
    followed = follow_attached(log) if log.attached else follow_run(log)
    works = {released.committed.iteration: released.committed.works for released in log.released}
    sections, problems = [], []
    for plan_version in sorted(log.plans):
        trace = log.trace.of_plan(plan_version)
        if not trace.iterations.height:
            continue
        try:
            recording = record(trace)
        except GraphError as error:
            problems.append(f"time lost under plan {plan_version}: {error}")
            continue
        if followed.cost is None:
            problems.append(
                f"time lost under plan {plan_version}: too few complete iterations to learn what chunks should take"
            )
            continue
        sections.append(with_lengths(recording, works, followed.cost, log.plans[plan_version]))
    return sections, followed.findings, problems


def _without_lengths(log: RunLog, options: DetectorOptions) -> tuple[list[TraceSection], Findings, list[str]]:
    """A run without plans, whose micro-batches are as long as it says or their peers let expect; where that cannot be told,
    ranks as a whole."""
    trace = log.trace
    try:
        if clocks := why_clocks_disagree(trace):
            raise GraphError(clocks)
        section = without_lengths(record(trace), options, log.works)
    except ValueError as error:
        found, why = follow_ranks(trace, options)
        return [], found, [f"long_sequences, stage_imbalance, time lost: {error}", *_unseen(why), NO_WEIGHT]
    if len(section.stages) > 1:
        section, findings = _with_replicas(section, follow_section(section, options), options)
        return [section], findings, []
    findings, why = follow_ranks(trace, options, section if section.lengths_logged else None)
    weight = [] if section.lengths_logged else [NO_WEIGHT]
    problems = [*_unseen(why), *([] if trace.streams else [NO_PLACES]), *weight]
    if why:
        return [], findings, problems
    section, findings = _with_replicas(as_slow(section, findings.verdicts), findings, options)
    return [section], findings, problems


def _unseen(why: str) -> list[str]:
    """What times that hold waiting do not show."""
    return [f"slow_device by these passes, long_sequences, time lost: {why}"] if why else []


def _with_replicas(section: TraceSection, findings: Findings, options: DetectorOptions) -> tuple[TraceSection, Findings]:
    """The section as it is expected to be without shifts of whole replicas, and the findings with those on them."""
    slow = {party.rank for one in findings.verdicts for party in one.culprits}
    excess = excess_of(section, section.parts.work_us - section.recording.within_us, slow, options)
    if excess is None:
        return section, _seeing(findings, OR_ITS_DATA)
    replicas = judge_replicas(section, excess, options, next_number(findings.verdicts), slow)
    smallest = smallest_slowdown(excess, options)
    section = as_slow(msgspec.structs.replace(section, smallest_replica_slowdown=smallest), replicas)
    findings = _seeing(findings, OR_ITS_DATA if smallest is None else f"of a whole replica by {percent(smallest)} or more")
    return section, msgspec.structs.replace(findings, verdicts=(*findings.verdicts, *replicas))


def _seeing(findings: Findings, more: str) -> Findings:
    """With what was seen of replicas, where devices were."""
    sight = findings.sight
    if sight.smallest_slowdown is None:
        return findings
    why = f"{sight.why}; {more}" if sight.why else more
    return msgspec.structs.replace(findings, sight=msgspec.structs.replace(sight, why=why))


def next_number(verdicts: Sequence[Verdict]) -> int:
    return 1 + max((verdict.verdict for verdict in verdicts), default=0)
