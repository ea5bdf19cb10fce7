"""Tensor parallelism on real ranks: the losses are those of whole layers, whatever dies, is slow or is cut anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, assert_exact, train
from support.training.threads_comm import Hub, ThreadComm, in_threads

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Hop, Plan, Role, Route, validate
from unskew.analytics.scheduler.propose import Proposal
from unskew.analytics.shards.parts import Part, Piece, ends_of, parts_by
from unskew.collector.events import PlanApplied, RunFinished, Verdict
from unskew.collector.files.checkpoints import Checkpoint, CheckpointIndex, Slice, part_name
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.node.checkpoints import CheckpointParts
from unskew.runtime.options import RunOptions
from unskew.runtime.protocol import CheckpointPart
from unskew.runtime.rank.checkpoint import CheckpointWriter, restore
from unskew.runtime.rank.migrate import Holdings, settle_in
from unskew.runtime.size import ModelSize

pytestmark = pytest.mark.limit(120)
TP = msgspec.structs.replace(SMALL, tp=2, dp=1, heads=4, layers=2, micro_batches=2, iterations=4)


@pytest.mark.slow
def test_groups_train_as_single_ranks_do(tmp_path: Path) -> None:
    run = train(tmp_path, base=TP)
    assert_exact(run, undisturbed_losses(TP), {0, 1, 2, 3})
    chunks = run.sql("select rank, \"group\", wait_tp_us from spans where run = $run and kind in ('F', 'B')")
    assert {(one["rank"], one["group"]) for one in chunks} == {(0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")}
    assert {one["wait_tp_us"] for one in chunks} == {0}
    sent = run.sql("select rank, peer, bytes from spans where run = $run and kind = 'send'")
    assert {(one["rank"], one["peer"]) for one in sent} == {(0, 2), (1, 3), (2, 0), (3, 1)}, "each byte crosses once"


@pytest.mark.slow
def test_a_dead_shard_and_a_slow_one_change_no_digit(tmp_path: Path) -> None:
    """The other replica does what the group did; the slow member's peer waits, and is not accused."""
    options = msgspec.structs.replace(TP, pp=1, dp=2, micro_batches=4, iterations=16)
    run = train(tmp_path, "slow:rank=3,factor=3,at=4", "kill:rank=1,at=10,point=in_sync", base=options)
    assert_exact(run, undisturbed_losses(options), {0, 2, 3})
    assert {verdict.culprits[0].rank: verdict.cause for verdict in run.of(Verdict)} == {1: "dead", 3: "slow_device"}
    (after,) = [Plan.from_data(plan.plan) for plan in run.of(PlanApplied)][1:]
    assert {hop.ranks for route in after.routes for hop in route.hops} == {(2, 3)}
    waits = run.sql("select rank, max(wait_tp_us) as most from chunks where run = $run group by rank order by rank")
    assert [one["most"] > 0 for one in waits] == [False, False, True, False]


def test_heads_that_the_degree_does_not_divide_are_dealt_whole() -> None:
    plan = RunOptions(tp=3, pp=1, dp=2, heads=4, dim=48, layers=4, micro_batches=4).first_plan()
    assert [str(role.part) for role in plan.roles if role.replica == 0] == ["0 to 1/4", "1/4 to 3/4", "3/4 to 1"]
    assert [sum(route.replica == replica for route in plan.routes) for replica in range(2)] == [2, 2]


@pytest.mark.slow
def test_a_run_may_begin_with_groups_of_any_sizes(tmp_path: Path) -> None:
    """Stages of three and one rank beside a replica of one stage; then the middle one of the three dies."""
    options = msgspec.structs.replace(TP, degrees="3,1/2", layers=4, micro_batches=6, iterations=10).with_degrees()
    assert (options.ranks, options.tp, options.pp, options.dp) == (6, 3, 2, 2)
    run = train(tmp_path, "kill:rank=1,at=6", base=options)
    assert_exact(run, undisturbed_losses(msgspec.structs.replace(options, degrees=None)), {0, 2, 3, 4, 5})
    first = Plan.from_data(run.of(PlanApplied)[0].plan)
    assert {hop.ranks: hop.n_layers for route in first.routes for hop in route.hops} == {(0, 1, 2): 3, (3,): 1, (4, 5): 4}
    assert [sum(route.replica == replica for route in first.routes) for replica in range(2)] == [4, 2]


def cut(plan: Plan, replicas: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> Plan:
    """`plan` with these stages per replica: (ranks, weights of their parts); layers and micro-batches as evenly as ever."""
    roles, hops_of = [], []
    for replica, stages in enumerate(replicas):
        each, hops = plan.n_layers // len(stages), []
        for stage, (ranks, weights) in enumerate(stages):
            hops.append(Hop(first_layer=stage * each, n_layers=each, ranks=tuple(ranks)))
            for shard, (rank, part) in enumerate(zip(ranks, parts_by(weights), strict=True)):
                roles.append(
                    Role(
                        rank=rank, replica=replica, stage=stage, first_layer=stage * each, n_layers=each, shard=shard, part=part
                    )
                )
        hops_of.append(tuple(hops))
    routes = tuple(
        Route(micro_batch=number, replica=number % len(replicas), hops=hops_of[number % len(replicas)])
        for number in range(len(plan.routes))
    )
    return msgspec.structs.replace(plan, plan_version=plan.plan_version + 1, roles=tuple(roles), routes=routes)


def test_layers_move_bit_for_bit_when_groups_are_cut_anew() -> None:
    """Uneven parts; one replica shrinks, its second rank leaves, while the other grows to three; then all have work again."""
    forms = [
        [[((0, 1), (3, 1))], [((2, 3), (1, 2))]],
        [[((0,), (1,))], [((2, 3, 4), (1, 2, 1))]],
        [[((0,), (1,)), ((1,), (1,))], [((2, 3), (1, 1)), ((4, 5), (3, 5))]],
    ]
    size, plan = ModelSize(n_layers=2, dim=16, heads=4), uniform_plan(tp=3, pp=1, dp=2, n_layers=2, micro_batches=4)
    layers: dict[int, dict[int, HeldLayer]] = {rank: {} for rank in plan.ranks}

    def make(number: int, part: Part | None, seed: int | None = None) -> HeldLayer:
        return HeldLayer(size, number, seed=seed, dtype=torch.float64, device=torch.device("cpu"), part=part)

    for rank in plan.ranks:
        for number in range(2):
            layers[rank][number] = make(number, plan.role_of[rank].part, seed=0)
            layers[rank][number].stepped(1)
    for form in forms:
        plan, hub = cut(plan, form), Hub()
        validate(plan)

        current = {rank: {number: [layer.part] for number, layer in held.items()} for rank, held in layers.items()}

        def live(rank: int, plan: Plan = plan, hub: Hub = hub, current: Holdings = current) -> None:
            settle_in(ThreadComm(hub, rank, range(6)), plan, layers[rank], {}, make, current=current, committed=1)

        in_threads(range(6), live)
        for rank in range(6):
            role = plan.role_of.get(rank)
            layers[rank] = {number: layer for number, layer in layers[rank].items() if role and role.holds(number, 1)}
            assert list(layers[rank]) == list(role.layers if role else ())
            for number, layer in layers[rank].items():
                assert (layer.part, layer.steps) == (plan.role_of[rank].part, 1)
                assert torch.equal(layer.pack(), make(number, layer.part, seed=0).pack())


def propose_in_turn(forms: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Scheduler proposes one of these after the other."""
    due = iter(forms)

    def propose(_: int, plan: Plan, *__: object) -> tuple[Proposal | None, str]:
        form = next(due, None)
        if form is None:
            return None, "all was tried"
        found = Proposal(
            plan=cut(plan, form), change="cut anew", predicted_us=1.0, baseline_us=2.0, gain_percent=50.0,
            gain_interval_us=None, cost_us=0.0, payback_iterations=1, moved_layers=1, considered=(),
        )  # fmt: skip
        return found, "a test"

    monkeypatch.setattr("unskew.analytics.loop.plans.propose", propose)


@pytest.mark.slow
def test_groups_are_cut_anew_shrink_and_grow_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven parts; one replica shrinks, its second rank on standby, while the other grows to three; all as it was."""
    forms = [
        [[((0, 1), (3, 1))], [((2, 3), (1, 2))]],
        [[((0,), (1,))], [((2, 3, 4), (1, 2, 1))]],
        [[((0,), (1,)), ((1,), (1,))], [((2, 3), (1, 1)), ((4, 5), (3, 5))]],
    ]
    propose_in_turn(forms, monkeypatch)
    options = msgspec.structs.replace(TP, tp=3, pp=1, dp=2, micro_batches=4, iterations=40)
    run = train(tmp_path, "slow:rank=0,factor=2,at=4", base=options)
    assert run.of(RunFinished)[-1].status == "done"
    assert run.losses == pytest.approx(undisturbed_losses(options), rel=0, abs=1e-8)
    assert run.sql("select * from executed($run) where times != 1") == []
    assert len(run.of(PlanApplied)) == 4


@pytest.mark.slow
def test_what_is_left_of_two_groups_that_were_cut_otherwise_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5/3 and 4/4 heads there are the first five and the last four: one of them, which both have, is the first one's."""
    propose_in_turn([[[((0, 1), (5, 3))], [((2, 3), (1, 1))]]], monkeypatch)
    options = msgspec.structs.replace(TP, pp=1, dp=2, heads=8, micro_batches=4, iterations=32)
    faults = "slow:rank=0,factor=2,at=4", "kill:rank=1,at=24", "kill:rank=2,at=26,point=in_sync"
    run = train(tmp_path, *faults, base=options)
    assert_exact(run, undisturbed_losses(options), {0, 3})
    plans = [Plan.from_data(plan.plan) for plan in run.of(PlanApplied)]
    assert [{*plan.teams} for plan in plans] == [{(0, 1), (2, 3)}, {(0, 1), (2, 3)}, {(2, 3)}, {(0, 3)}]
    assert [str(role.part) for role in plans[-1].roles] == ["0 to 5/8", "5/8 to 1"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_one_cut_is_read_by_another(tmp_path: Path) -> None:
    size = ModelSize(n_layers=1, dim=16, heads=4)

    def layer(part: Part | None) -> HeldLayer:
        return HeldLayer(size, 0, seed=0, dtype=torch.float64, device=torch.device("cpu"), part=part)

    trained = layer(None)
    for parameter in trained.parameters:
        parameter.grad = torch.randn_like(parameter)
    trained.step()
    written: list[CheckpointPart] = []
    for rank, part in enumerate(parts_by([1, 1])):
        mine = layer(part)
        mine.unpack(trained.pack(Piece(0, *ends_of(part))), Piece(0, *ends_of(part)))
        writer = CheckpointWriter(tmp_path, rank, written.append)
        writer.save(1, {0: mine}, [0])
        writer.finish(20)
    assert [part.problem for part in written] == ["", ""]
    parts, whole = CheckpointParts(1).take(written[0])
    assert whole is None, "half a layer is no checkpoint"
    _, whole = parts.take(written[1])
    assert whole is not None
    assert whole[0] == CheckpointIndex(iterations=1, writers=(0,), slices={0: (Slice(0, 0, 1, 2), Slice(1, 1, 2, 2))})
    checkpoint = Checkpoint(tmp_path / "00000001", whole[0])
    assert (checkpoint.folder / part_name(1)).exists()
    for part in (None, *parts_by([1, 2, 5])):
        read = restore(checkpoint, 0, part, lambda *, part: layer(part))
        assert (read.steps, torch.equal(read.pack(), trained.pack(Piece(0, *ends_of(part))))) == (1, True)
