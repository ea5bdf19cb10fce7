"""What a chunk takes by itself: the first layer that is executed takes longer than those in the middle."""

import pytest
import torch
from torch import Tensor

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.actions import action_of
from unskew.runtime.chunk_clock import ChunkClocks, OwnTimes


class _Timed(torch.autograd.Function):
    """A layer whose forward and backward take the next of `us` each."""

    @staticmethod
    def forward(ctx, x: Tensor, clock: "_Clock") -> Tensor:
        ctx.clock = clock
        clock.spend()
        return x * 2.0

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        ctx.clock.spend()
        return dy * 2.0, None


class _Clock:
    """Of each pass the first layer takes 5 us, the others 2."""

    def __init__(self) -> None:
        self.now_us, self.spent = 0, 0

    def begin(self) -> None:
        self.now_us, self.spent = self.now_us + 100, 0

    def spend(self) -> None:
        self.now_us += 2 if self.spent else 5
        self.spent += 1

    def ns(self) -> int:
        return 1000 * self.now_us


def _executed(plan: Plan, hop: int, *, parts: int = 1, turn: int = 0) -> OwnTimes:
    """A chunk's forward and backward pass, which begin some time after each other."""
    found: OwnTimes = {}
    clock, action = _Clock(), action_of(plan.routes[0], "F", hop)
    clocks = ChunkClocks(plan, clock.ns, found, turn)
    x = torch.ones(1, requires_grad=True)
    clock.begin()
    clocks.forward(action, parts)
    for layer in range(action.first_layer, action.first_layer + action.n_layers):
        clocks.before(action, layer, x)
        x = _Timed.apply(x, clock)
    clock.begin()
    clocks.backward(action)
    x.backward()
    return found


@pytest.mark.parametrize(("hop", "known"), [(0, {"B": [3.0]}), (1, {"F": [3.0], "B": [3.0]}), (2, {"F": [3.0]})])
def test_the_first_layer_over_those_in_the_middle_but_where_the_embedding_or_the_head_is(hop: int, known: OwnTimes) -> None:
    assert _executed(uniform_plan(n_layers=12, tp=1, pp=3, dp=1, micro_batches=3), hop) == known


def test_what_has_no_middle_or_is_executed_in_parts_tells_nothing() -> None:
    assert _executed(uniform_plan(n_layers=6, tp=1, pp=3, dp=1, micro_batches=3), 1) == {}
    assert _executed(uniform_plan(n_layers=12, tp=1, pp=3, dp=1, micro_batches=3), 1, parts=2) == {}


def test_each_micro_batch_is_measured_in_every_fourth_turn() -> None:
    plan = uniform_plan(n_layers=12, tp=1, pp=3, dp=1, micro_batches=3)
    assert [bool(_executed(plan, 1, turn=turn)) for turn in range(8)] == [True, False, False, False] * 2
