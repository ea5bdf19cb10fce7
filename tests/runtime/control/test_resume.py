"""Checkpoints: everything dies and the run goes on from disk, on other ranks, with the losses of an undisturbed one."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import collectors, send_signal, tree
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, Run, train, wait_until
from support.training.warm_processes import Forked, warm_process

from unskew.analytics.core.faults import parse_faults
from unskew.analytics.core.plan import PlanError
from unskew.analytics.scheduler.recovery import recover
from unskew.collector import rights
from unskew.collector.command import Command
from unskew.collector.events import CheckpointSaved, DeviceJoined, IterationCommitted, Note, RunStarted
from unskew.collector.files.checkpoints import CheckpointIndex, checkpoints, damaged, part_name, seal
from unskew.collector.files.tail import Entry, Tail
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import send
from unskew.runtime.control import launch
from unskew.runtime.control.resume import resumed
from unskew.runtime.node.checkpoints import CheckpointParts
from unskew.runtime.node.processes import process_state
from unskew.runtime.options import OptionsError, RunOptions
from unskew.runtime.protocol import CheckpointPart
from unskew.runtime.rank.checkpoint import to_write

ITERATIONS = 30
OPTIONS = msgspec.structs.replace(SMALL, iterations=ITERATIONS, heads=2)
GROUPS = msgspec.structs.replace(OPTIONS, tp=2, pp=1)
TRAIN = (
    "run --no-dashboard --no-faults --device virtual --tp 2 --pp 1 --dp 2 --layers 4 --micro-batches 4 --dim 16 --heads 2 "
    f"--tokens 64 --iterations {ITERATIONS} --dtype float64 --checkpoint-every 4 --respawns 0"
).split()


def unskew(store: Path, *arguments: str) -> Forked:
    return warm_process().start_command(*arguments, "--store", str(store))


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """All layouts here have these."""
    return undisturbed_losses(OPTIONS)


def with_a_checkpoint(store: Store) -> str:
    """The run of a store, once it has one."""
    assert wait_until(lambda: any(len(checkpoints(store, run)) > 0 for run in store.spooled_runs()), 60)
    return store.spooled_runs()[0]


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_new_controller_takes_over_the_living_ranks_of_groups(tmp_path: Path, undisturbed: list[float]) -> None:
    store = Store.locate(tmp_path)
    process = unskew(tmp_path, *TRAIN)
    run = with_a_checkpoint(store)
    events = [entry.event for entry in Tail(store, run, only="@").poll()]
    pids = {event.rank: event.pid for event in events if isinstance(event, DeviceJoined)}
    process.kill()
    os.kill(pids[1], signal.SIGKILL)  # nobody is there to hear of it, and the others wait
    process.wait()

    answer = tmp_path / "answer.json"
    went_on = unskew(tmp_path, "run", "--resume", run, "--no-dashboard", "--json", str(answer))
    assert went_on.wait(90) == 0
    summary = msgspec.json.decode(answer.read_bytes())
    assert (summary["run_id"], summary["status"], summary["resumed_at"]) == (run, "done", None)
    assert summary["losses"] == pytest.approx(undisturbed, rel=0, abs=1e-8)
    assert summary["events"]["written"] == summary["events"]["stored"]
    assert [plan["reason"] for plan in summary["plans"]][:2] == ["the run's first plan", "rank 1 was lost (exit)"]
    with open_store(store) as reader:
        assert dict(reader.sql("select rank, pid from devices where run = ?", [run]).iter_rows()) == pids
        assert reader.sql(f"select * from executed('{run}') where times != 1").is_empty()
    # The agent is nobody's child any more: it ends in its own time, and who reaps it and its ranks is the machine's affair.
    assert wait_until(lambda: all(process_state(pid) in (None, "Z") for pid in pids.values()), 30)
    for pid in collectors(store):
        send_signal(pid, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("layout", ["--tp 1 --pp 2 --dp 1", "--degrees 2,1"])
def test_everything_dies_and_the_run_goes_on_from_disk_on_fewer_ranks(
    layout: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    """Groups of two wrote it, single ranks read it, or a group and a single rank."""
    store = Store.locate(tmp_path)
    process = unskew(tmp_path, *TRAIN)
    run = with_a_checkpoint(store)
    time.sleep(0.37)
    for pid in tree(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    at = checkpoints(store, run)[-1].index.iterations

    answer = tmp_path / "answer.json"
    went_on = unskew(tmp_path, "run", "--resume", run, "--no-dashboard", *layout.split(), "--json", str(answer))
    assert went_on.wait(90) == 0
    summary = msgspec.json.decode(answer.read_bytes())
    assert (summary["resumed_from"], summary["resumed_at"]) == (run, at)
    assert summary["iterations"] == ITERATIONS - at
    assert summary["losses"] == pytest.approx(undisturbed, rel=0, abs=1e-8)
    with open_store(store) as reader:
        (first,) = reader.sql("select min(iteration) as n from iterations where run = ?", [summary["run_id"]])["n"]
    assert first == at
    for pid in collectors(store):
        send_signal(pid, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.limit(60)
def test_a_death_costs_the_checkpoint_at_most_and_a_disk_that_refuses_it_costs_no_rank(tmp_path: Path) -> None:
    def the_first_is_written(run: Run, entry: Entry) -> None:
        """Ranks run some iterations ahead of their controller, then they wait for it."""
        if isinstance(entry.event, IterationCommitted) and (entry.event.iteration, entry.event.rank) == (1, 0):
            assert wait_until(
                lambda: len([*run.store.checkpoints(run.id).glob("00000004/*/.metadata")]) == run.options.ranks, 40
            )
            time.sleep(0.2)  # until the last has said so

    tmp_path.chmod(rights.SHARED)
    run = train(tmp_path, "kill:rank=1,at=7,point=before_step", checkpoint_every=4, on_event=the_first_is_written)
    made = [(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "checkpoints").rglob("*")]
    assert {*made} == {(True, rights.SHARED), (False, 0o660)}, "what torch writes has the rights of the store, too"
    saved = [event.iterations for event in run.of(CheckpointSaved)]
    assert saved == [iterations for iterations in (4, 8, 12) if iterations in saved]
    assert {4, 12} <= {*saved}  # the one after iteration 7 misses a part when the rank died before its thread had written
    assert [one.index.iterations for one in checkpoints(run.store, run.id)] == saved[-2:]
    (run.store.root / "checkpoints").rename(run.store.root / "kept")
    (run.store.root / "checkpoints").write_text("no folder")
    refused = train(tmp_path, checkpoint_every=4)
    assert refused.summary.status == "done"
    assert refused.of(CheckpointSaved) == []
    assert all("could not be written" in note.text for note in refused.of(Note))
    assert len(refused.of(Note)) == 3 * refused.options.ranks


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(1, 4), st.integers(4, 12), st.data())
def test_each_layer_is_written_by_one_living_holder_and_by_all_in_turn(
    pp: int, dp: int, layers: int, data: st.DataObject
) -> None:
    plan = msgspec.structs.replace(SMALL, pp=pp, dp=dp, layers=layers).first_plan()
    for rank in data.draw(st.permutations(plan.ranks)):
        written = [layer for rank in plan.ranks for layer in to_write(plan, rank)]
        assert sorted(written) == list(range(layers))
        assert all(layer in plan.role_of[rank].layers for rank in plan.ranks for layer in to_write(plan, rank))
        try:
            plan = recover(plan, {rank}, plan.plan_version + 1)
        except PlanError:
            break


def test_a_save_that_was_cut_short_leaves_the_one_before(tmp_path: Path) -> None:
    store = Store.locate(tmp_path)
    for iterations in (4, 8, 12):
        (store.checkpoints("run") / f"{iterations:08d}" / part_name(0)).mkdir(parents=True)
        seal(store, "run", CheckpointIndex(iterations=iterations, writers=(0, 0)))
    (store.checkpoints("run") / "00000016" / part_name(0)).mkdir(parents=True)
    assert [one.index.iterations for one in checkpoints(store, "run")] == [8, 12]
    assert checkpoints(store, "run")[-1].part(1) == store.checkpoints("run") / "00000012" / "rank-0000"


@pytest.mark.parametrize("lost", ["index.json", "rank-0000/.metadata", "rank-0000/data"])
@pytest.mark.parametrize("how", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:9])], ids=["gone", "cut"])
def test_a_checkpoint_that_lacks_something_is_passed_over(lost: str, how: Callable[[Path], object], tmp_path: Path) -> None:
    store = Store.locate(tmp_path)
    for iterations in (4, 8):
        part = store.checkpoints("run") / f"{iterations:08d}" / part_name(0)
        part.mkdir(parents=True)
        for name in (".metadata", "data"):
            (part / name).write_bytes(bytes(10))
        seal(store, "run", CheckpointIndex(iterations=iterations, writers=(0, 0)))
    how(part.parent / lost)
    assert [one.index.iterations for one in checkpoints(store, "run")] == [4]
    assert damaged(store, "run") == ([] if (lost, how) == ("index.json", Path.unlink) else [part.parent])


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("layout", "lost"), [(OPTIONS, "layers 2, 3"), (GROUPS, "layers 0, 1, 2, 3")], ids=["stages", "groups"]
)
def test_with_no_plan_left_it_waits_for_ranks_and_goes_on_from_its_checkpoint(
    layout: RunOptions, lost: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    """Of groups first two lose a member each, and what is left of both is one, until that loses one, too."""
    store, asked = Store.locate(tmp_path), []

    def ask(entry: Entry) -> None:
        if isinstance(entry.event, Note) and "it waits for ranks: 1 live, a pipeline has 2" in entry.event.text:
            run = store.spooled_runs()[0]
            send(store, run, Command(kind="rank", run=run, target="3", by="ann"))
            asked.append(entry.event.text)

    options = msgspec.structs.replace(layout, store=str(tmp_path), checkpoint_every=4, when_stuck="wait", mode="approve")
    faults = parse_faults(["kill:rank=1,at=7", "kill:rank=2,at=9", "kill:rank=3,at=12"], ranks=4, iterations=ITERATIONS)
    summary = launch.run(msgspec.structs.replace(options, faults=faults), on_event=ask)
    assert len(asked) == 1
    assert f"no living rank holds {lost} after" in asked[0]
    # Checkpoints are written beside training: which of them is the newest whole one depends on the disk and the load.
    assert summary.status == "done"
    assert f"after {summary.resumed_at} iterations" in asked[0]
    assert summary.resumed_at in {4, 8, 12}
    assert summary.losses == pytest.approx(undisturbed, rel=0, abs=1e-8)
    assert [len(checkpoints(store, run)) for run in (summary.resumed_from, summary.run_id) if run] == [1, 2]
    for pid in collectors(store):
        send_signal(pid, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.limit(60)
@pytest.mark.usefixtures("forked")
def test_with_no_plan_left_before_the_first_checkpoint_it_begins_anew(tmp_path: Path, undisturbed: list[float]) -> None:
    stated: list[str] = []

    def hear(entry: Entry) -> None:
        stated.extend([entry.event.text] if isinstance(entry.event, Note) else [])

    faults = parse_faults(["kill:rank=1,at=2"], ranks=2, iterations=ITERATIONS)
    options = msgspec.structs.replace(OPTIONS, dp=1, faults=faults, store=str(tmp_path), when_stuck="wait", respawns=3)
    summary = launch.run(options, on_event=hear)
    assert any("a pipeline has 2; then it begins anew, for it has no checkpoint yet" in text for text in stated)
    assert (summary.status, summary.resumed_at) == ("done", None)
    assert summary.losses == pytest.approx(undisturbed, rel=0, abs=1e-8)
    for pid in collectors(Store.locate(tmp_path)):
        send_signal(pid, signal.SIGTERM)


def part(rank: int, iterations: int, *layers: int) -> CheckpointPart:
    return CheckpointPart(rank=rank, iterations=iterations, layers=layers, bytes=10, seconds=0.5, paused_us=rank)


def test_a_checkpoint_is_whole_with_its_last_part_and_gives_up_older_ones() -> None:
    parts, whole = CheckpointParts(3).take(part(0, 4, 0))
    assert whole is None
    for one in (part(0, 8, 0), part(1, 8, 1)):
        parts, whole = parts.take(one)
        assert whole is None
    parts, whole = parts.take(part(2, 8, 2))
    assert whole is not None
    index, saved = whole
    assert (index.iterations, index.writers, saved.bytes, saved.paused_us) == (8, (0, 1, 2), 30, 2)
    assert parts.parts == {}


@pytest.mark.slow
def test_what_cannot_be_resumed_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = train(tmp_path, iterations=2, checkpoint_every=0, degrees="1,1/1")
    (started,) = run.of(RunStarted)
    assert (started.first_iteration, started.resumed_from) == (0, None)
    with open_store(run.store) as reader:
        with pytest.raises(OptionsError, match="has no whole checkpoint in"):
            resumed(run.store, reader, run.id, {}, ())
        with pytest.raises(OptionsError, match="ended before it began to train"):
            resumed(run.store, reader, "killed-at-once", {}, ())
    (run.store.checkpoints(run.id) / "00000002").mkdir(parents=True)
    seal(run.store, run.id, CheckpointIndex(iterations=2, writers=(0,) * 3))
    index = run.store.checkpoints(run.id) / "00000002" / "index.json"
    sealed = index.read_text()
    with open_store(run.store) as reader:
        index.write_text(sealed.replace('"format":2,', ""))
        with pytest.raises(OptionsError, match="are of an earlier version of unskew"):
            resumed(run.store, reader, run.id, {}, ())
        index.write_text(sealed)
        with pytest.raises(OptionsError, match="has trained 2 of 2 iterations"):
            resumed(run.store, reader, run.id, {}, ())
        with pytest.raises(OptionsError, match="--seed 5 is not what"):
            resumed(run.store, reader, run.id, {"seed": 5}, ("seed",))
        with pytest.raises(OptionsError, match="began with --degrees 1,1/1, allowed: --degrees, or --tp, --pp and --dp"):
            resumed(run.store, reader, run.id, {"dp": 1}, ("dp",))
        asked = {"iterations": 9, "tp": 1, "pp": 2, "dp": 1, "seed": 4}
        options = resumed(run.store, reader, run.id, asked, ("iterations", "tp", "pp", "dp"))
    assert (options.iterations, options.dp, options.seed, options.first_iteration) == (9, 1, 0, 2)
    assert options.stages == ((1, 1),), "what is asked for now is no longer stage by stage"


def test_few_ranks_make_up_the_largest_replicas_that_they_can() -> None:
    options = RunOptions(degrees="3,2/1,1/2,1").with_degrees()
    made = {ranks: there and there.stages for ranks in (1, 2, 4, 7, 9) for there in [options.within(ranks)]}
    assert made == {1: None, 2: ((1, 1),), 4: ((2, 1),), 7: ((3, 2), (1, 1)), 9: ((3, 2), (2, 1))}
    few = options.within(2)
    assert few is not None
    assert (few.tp, few.pp, few.dp) == (1, 2, 1)
    assert RunOptions(degrees="2,2,2/2,2,2").with_degrees() == RunOptions(tp=2, pp=3, dp=2), "all have as many"
    even = RunOptions(tp=2, pp=3, dp=4).within(17)
    assert even is not None
    assert (even.stages, even.degrees) == (((2, 2, 2),) * 2, None)
