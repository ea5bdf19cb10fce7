"""Who did not join: small standstills by hand, and NVIDIA's two injected ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.traces.flight_recorder_dumps import published

from unskew.analytics.diagnosis.flight_recorder import HangDiagnosis, explain, in_progress
from unskew.collector.events import CollectiveRecorded, GroupRecorded
from unskew.collector.formats.importers import flight_recorder


def entry(rank: int, group: str, seq: int, *, record: int = 0, op: str = "all_reduce", p2p: int | None = None):
    return CollectiveRecorded(
        rank=rank, record=record, group=group, group_description=group, group_seq=seq, op=op, state="started",
        is_p2p=p2p is not None, p2p_seq=p2p,
    )  # fmt: skip


def group(name: str, *members: int, ranks: tuple[int, ...] | None = None) -> list[GroupRecorded]:
    return [
        GroupRecorded(rank=rank, group=name, group_description=name, members=members)
        for rank in (members if ranks is None else ranks)
    ]


PAIRS = [*group("tp", 0, 1), *group("tq", 2, 3), *group("dp", 0, 2), *group("dq", 1, 3)]
SCENARIOS = {
    "one did not join": ([entry(0, "tp", 5)], (1,), (0,), "nothing in progress"),
    "a chain: 3 holds up 2, and 2 holds up 0": ([entry(0, "dp", 9), entry(2, "tq", 4)], (3,), (0, 2), "nothing in progress"),
    "the oldest operation counts, not the newest": (
        [entry(0, "dp", 9, record=1), entry(0, "tp", 5, record=2), entry(1, "tp", 5, record=1)],
        (2,),
        (0,),
        "nothing in progress",
    ),
    "its device has stopped in what all have joined": (
        [entry(2, "tq", 4), entry(3, "tq", 4), entry(0, "dp", 9)],
        (2,),
        (0,),
        "which does not end",
    ),
    "no dump": ([entry(0, "tp", 5)], (1,), (0,), "no dump: rank 1"),
    "a message whose other side is not there": ([entry(0, "tp", 0, op="nccl:send 0->1", p2p=3)], (1,), (0,), "did not join"),
    "all have joined": ([entry(0, "tp", 5), entry(1, "tp", 5)], (), (), ""),
    "they wait for each other": ([entry(0, "tp", 5), entry(1, "dq", 5), entry(3, "tq", 5), entry(2, "dp", 5)], (), (), ""),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_names_who_is_waited_for_and_waits_for_nobody(name: str) -> None:
    entries, culprits, victims, because = SCENARIOS[name]
    groups = group("tp", 0, 1, ranks=(0,)) if name == "no dump" else PAIRS
    found = explain(entries, groups)
    assert (found.culprits, found.victims) == (culprits, victims)
    assert because in "; ".join(found.sentences)
    assert bool(found.abstained) == (not culprits)


def test_two_groups_at_once_are_two_sentences_of_global_ranks() -> None:
    """Rank 12 holds up its pipeline in a message, its experts in a collective; groups that were split share a name."""
    groups = [*group("pp", 4, 8, 12), *group("ep", 12, 13, 14), *group("ep", 20, 21), *group("world", *range(24))]
    entries = [
        entry(8, "pp", 0, op="nccl:send 1->2", p2p=6),
        entry(13, "ep", 26, op="all_to_all"),
        entry(14, "ep", 26, op="all_to_all"),
        entry(20, "ep", 31, op="all_to_all"),
        entry(21, "ep", 31, op="all_to_all"),
        entry(4, "pp", 0, op="nccl:recv 0<-1", p2p=2),
    ]
    found = explain(entries, groups)
    assert found.culprits == (12,)
    assert found.victims == (4, 8, 13, 14)
    assert found.sentences == (
        "rank 12 did not join nccl:send 8->12 #6 of pp (ranks 4, 8, 12), in which rank 8 waits",
        "rank 12 did not join all_to_all #26 of ep (ranks 12-14), in which ranks 13-14 wait",
        "nothing in progress: rank 12",
    )


@pytest.mark.parametrize(("case", "injected"), [("lock_gil_1st", (9, 14)), ("gpu_error_1st", (12, 14))])
def test_finds_the_ranks_into_which_nvidia_injected_a_fault(case: str, injected: tuple[int, ...], tmp_path: Path) -> None:
    found = standstill(case, tmp_path)
    assert found.culprits == injected
    assert not set(found.victims) & set(injected)


def standstill(case: str, folder: Path) -> HangDiagnosis:
    published(case, folder)
    (run,) = flight_recorder.read(folder / "dumps")
    return explain(
        [event for event in run.events if isinstance(event, CollectiveRecorded)],
        [event for event in run.events if isinstance(event, GroupRecorded)],
    )


def test_of_recorders_that_note_no_end_only_what_somebody_has_not_launched_is_open() -> None:
    """As Gloo's of two shards on two FSDP2 ranks had it, rank 3 asleep: its last operations are over, as are those of rank 0
    that rank 2 has launched as well."""
    launched = [
        entry(0, "tp", 45, record=125), entry(0, "dp", 81, record=124), entry(1, "tp", 44, record=122),
        entry(1, "dq", 81, record=124), entry(2, "tq", 45, record=125), entry(2, "dp", 81, record=124),
        entry(3, "tq", 44, record=122), entry(3, "dq", 80, record=123),
        entry(1, "dq", 80, record=99, op="send 0->1", p2p=7),
    ]  # fmt: skip
    found = explain(*in_progress([*launched, *PAIRS], {0, 1, 2}))
    assert (found.culprits, found.victims) == ((3,), (0, 1, 2))
    assert "rank 3 did not join all_reduce #45 of tq (ranks 2-3), in which rank 2 waits" in found.sentences
    assert "rank 3 did not join all_reduce #81 of dq (ranks 1, 3), in which rank 1 waits" in found.sentences
    assert explain(*in_progress([*launched, *PAIRS], ())).culprits == ()
