"""A DDP training that is not ours: the right rank and cause, nobody where nothing is wrong, the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.jobs import attached_job
from support.training.warm_processes import warm_process

from unskew.collector.events import DetectionLimit, Event, IterationJudged, Verdict, VerdictClosed
from unskew.collector.paths import Store
from unskew.runtime.attach.watcher import JobWatcher

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


def judged(jobs: Path, case: str) -> list[Event]:
    """What the watcher decides on a run."""
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
    assert all([party.rank for party in verdict.culprits] == [1] for verdict in more)


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
    events = judged(jobs, case)
    named = [one for one in events if isinstance(one, Verdict) and one.culprits]
    assert not named
    if case == "longer":
        (verdict,) = verdicts(events)
        assert (verdict.cause, verdict.evidence["ranks"]) == ("long_sequences", [1])
    else:
        # Steps of some milliseconds, now with a core, now without: the whole job can be too noisy, which is said then.
        limit = [one for one in events if isinstance(one, DetectionLimit)][-1]
        if limit.smallest_slowdown is None:
            assert "of the whole job by" in limit.why or "longer than noise explains" in limit.why
        else:
            assert 1.3 < limit.smallest_slowdown <= 2.0


@pytest.mark.alone
@pytest.mark.limit(300)
def test_losses_are_the_same_bit_for_bit(jobs: Path) -> None:
    for rank in range(2):
        measured, untouched = (json.loads((jobs / f"{case}-{rank}.json").read_text()) for case in ("nothing", "untouched"))
        assert len(measured) == attached_job.STEPS
        assert measured == untouched
