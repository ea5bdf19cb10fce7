"""A DDP training that is not ours: the right rank and cause, nobody where nothing is wrong, the same losses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from support.jobs import attached_job
from support.jobs.pace import moved, times_as_long, times_as_long_as_before
from support.training.warm_processes import warm_process

from unskew.analytics.diagnosis.diagnose import diagnose
from unskew.analytics.loop.watched.attached_rules import SETTLED_S
from unskew.collector.events import CHUNK_KINDS, DetectionLimit, Event, IterationJudged, Verdict, VerdictClosed
from unskew.collector.formats.registry import bring_in, take_out
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.edge.load_run import load_run
from unskew.runtime.attach.outside.watcher import JobWatcher

CAUSES = {"loader": "input_bound", "forward": "slow_device", "backward": "slow_device", "optimizer": "slow_device",
          "other": "slow_device"}  # fmt: skip
KINDS = {"forward": "F", "backward": "B", "optimizer": "optimizer", "other": "other"}
LATE = tuple(CAUSES)
QUIET = ("nothing", "random", "longer")
CHANGED = f"backward@{attached_job.LATE_FROM}"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, one after the other, in ranks forked from one process."""
    folder = tmp_path_factory.mktemp("jobs")
    cases = (*LATE, *QUIET, CHANGED, "untouched")
    code, printed = warm_process().run_script(attached_job.__file__, str(folder / "store"), str(folder), *cases, timeout_s=280)
    assert code == 0, printed
    assert "unskew" not in printed
    return folder


@cache
def judged(jobs: Path, case: str) -> list[Event]:
    """What the watcher decides on a run, which is watched once."""
    events: list[Event] = []
    watcher = JobWatcher(Store(jobs / "store"), attached_job.run_of(case), ["a test"], lambda entry: events.append(entry.event))
    watcher.finish(0)
    watcher.close()
    assert sum(isinstance(event, IterationJudged) for event in events) == attached_job.STEPS
    return events


def verdicts(events: list[Event]) -> list[Verdict]:
    """Those that are open in the end, each as it was last revised."""
    closed = {event.verdict for event in events if isinstance(event, VerdictClosed)}
    newest = {event.verdict: event for event in events if isinstance(event, Verdict)}
    return [event for number, event in newest.items() if number not in closed]


def unfounded(store: Path, run: str, given: Iterable[Verdict], *, alike: bool = True) -> list[str]:
    """The sentences on a rank of whose slowness plain medians do not show 0.85: neither over its own time before nor over the
    other's, passes of ranks that have not `alike` to do left out."""
    found = []
    for verdict in (one for one in given if one.culprits):
        (rank,) = (party.rank or 0 for party in verdict.culprits)
        during = (verdict.since_iteration, verdict.until_iteration or verdict.at_iteration + 1)
        for kind, speed in verdict.speed.items():
            longer = times_as_long_as_before(store, run, rank, kind, during)
            if alike or kind not in CHUNK_KINDS:
                longer = max(longer, times_as_long(store, run, rank, kind, during))
            if longer * speed < 0.85:
                found.append(verdict.sentence)
        if not verdict.speed:
            found.append(verdict.sentence)
    return found


@pytest.mark.alone
@pytest.mark.limit(300)
@pytest.mark.parametrize("part", LATE)
def test_a_rank_that_is_late_from_its_first_step_on_is_named_with_its_phase(jobs: Path, part: str) -> None:
    first, *more = verdicts(judged(jobs, part))
    assert (first.cause, [party.rank for party in first.culprits]) == (CAUSES[part], [1])
    if part != "loader":  # its other passes may be a little slow too: it comes to them with cold caches
        late, *others = sorted(first.speed, key=lambda kind: first.speed[kind])
        assert late == KINDS[part]
        assert all(first.speed[kind] > 2 * first.speed[late] for kind in others)
    assert first.at_iteration <= 32
    others = (verdict for verdict in more if [party.rank for party in verdict.culprits] != [1])
    assert not unfounded(jobs / "store", attached_job.run_of(part), others)


@pytest.mark.alone
@pytest.mark.limit(300)
def test_a_rank_that_turns_slow_is_dated(jobs: Path) -> None:
    (verdict,) = verdicts(judged(jobs, CHANGED))
    assert (verdict.cause, [party.rank for party in verdict.culprits]) == ("slow_device", [1])
    assert min(verdict.speed, key=lambda kind: verdict.speed[kind]) == "B"
    assert abs(verdict.since_iteration - attached_job.LATE_FROM) <= 2


@pytest.mark.alone
@pytest.mark.limit(300)
@pytest.mark.parametrize("case", QUIET)
def test_nobody_is_named_where_nothing_is_wrong_or_only_the_lengths_differ(jobs: Path, case: str) -> None:
    """But a core that really is slower for a while: those of a shared machine are, at times by half for half a second."""
    events = judged(jobs, case)
    given = (one for one in events if isinstance(one, Verdict))
    assert not unfounded(jobs / "store", attached_job.run_of(case), given, alike=case != "longer")
    if case == "longer":
        (verdict,) = (one for one in verdicts(events) if not one.culprits)
        assert (verdict.cause, verdict.evidence["ranks"]) == ("long_sequences", [1])
    else:
        # Steps of some milliseconds, now with a core, now without: the whole job can be too noisy, or lose time for no cause
        # that is seen, which is said then; and what lasted for less than two seconds is too short to bound a device's slowness.
        limit = [one for one in events if isinstance(one, DetectionLimit)][-1]
        if limit.smallest_slowdown is None:
            by_device = "of any device by" in limit.why
            job = ("of the whole job by", "longer than noise explains", "no cause explains")
            assert by_device or any(reason in limit.why for reason in job)
            lasted_s = sum(one.measured_us for one in events if isinstance(one, IterationJudged)) / 1e6
            assert not by_device or lasted_s < SETTLED_S or moved(jobs / "store", attached_job.run_of(case)) > 0.15


@pytest.mark.alone
@pytest.mark.limit(300)
def test_losses_are_the_same_bit_for_bit(jobs: Path) -> None:
    for rank in range(2):
        measured, untouched = (json.loads((jobs / f"{case}-{rank}.json").read_text()) for case in ("nothing", "untouched"))
        assert len(measured) == attached_job.STEPS
        assert measured == untouched


@pytest.mark.alone
@pytest.mark.limit(300)
@pytest.mark.parametrize("part", LATE)
def test_what_is_exported_of_a_watched_job_and_brought_in_again_is_never_called_well(
    jobs: Path, part: str, tmp_path: Path
) -> None:
    """What is late beside the passes is recorded as time that nobody looked at. The other rank's core may really be slower for
    a while: who is named was."""
    judged(jobs, part)
    take_out(Store(jobs / "store"), "kineto", attached_job.run_of(part), tmp_path / "traces")
    again = Store(tmp_path / "store")
    (brought,) = bring_in(again, "kineto", tmp_path / "traces")
    with open_store(again) as reader:
        found = diagnose(load_run(reader, brought.run))
    assert found.outcome != "well", found.sentence
    assert not unfounded(again.root, brought.run, (one for one in found.verdicts if one.culprits and one.culprits[0].rank == 0))
