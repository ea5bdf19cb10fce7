"""Fault SPECs and device profiles: what is accepted means what it says, what is not is refused in one sentence."""

import msgspec
import pytest

from unskew.analytics.cluster.random_faults import APART, parse_all
from unskew.analytics.core.device_profiles import ProfileError, profile
from unskew.analytics.core.faults import FaultError, parse_fault, parse_faults
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.workload import work_of
from unskew.collector.events import Fault


def parse(text):
    return parse_fault(text, ranks=8, iterations=60)


def test_a_slow_fault_slows_its_phase_in_its_iterations_only():
    fault = parse("slow:rank=3,factor=1.8,at=30,until=40,phase=B")
    assert [fault.slowdown("B", i) for i in (29, 30, 39, 40)] == [1.0, 1.8, 1.8, 1.0]
    assert fault.slowdown("F", 30) == 1.0
    assert parse("slow:rank=3,factor=1.8,at=30").slowdown("F", 59) == 1.8


def test_the_other_kinds():
    assert parse("kill:rank=6,at=7") == Fault(kind="kill", rank=6, at_iteration=7, point="compute")
    assert parse("kill:rank=6,at=7,point=before_step").point == "before_step"
    assert parse("hang:rank=0,at=0").slowdown("F", 5) == 1.0
    assert parse("freeze:rank=2,at=50").strikes


def test_a_slow_fault_rises_comes_and_goes_and_a_slow_link_delays_its_own_messages():
    ramp = parse("slow:rank=3,factor=3,at=10,ramp=4")
    assert [ramp.slowdown("F", i) for i in (9, 10, 11, 13, 30)] == [1.0, 1.5, 2.0, 3.0, 3.0]
    now_and_then = parse("slow:rank=3,factor=3,at=10,every=4,on=1,until=16")
    assert [i for i in range(9, 20) if now_and_then.slowdown("B", i) > 1] == [10, 14]
    link = parse("slow_link:rank=0,peer=1,delay_ms=4,at=10,ramp=2")
    assert [link.delay_us(0, 1, i) for i in (9, 10, 11)] == [0.0, 2_000.0, 4_000.0]
    assert link.delay_us(1, 0, 11) == 0.0
    assert msgspec.to_builtins(link) == {  # as a run's options in its log have it
        "kind": "slow_link", "rank": 0, "peer": 1, "delay_ms": 4.0, "at": 10, "ramp": 2,
    }  # fmt: skip


def test_random_faults_are_those_of_their_seed_and_leave_each_layer_a_holder():
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
    faults = parse_all(["random:seed=1,every=4", "slow:rank=0,factor=2,at=3"], plan, iterations=400)
    assert faults == parse_all(["random:seed=1,every=4", "slow:rank=0,factor=2,at=3"], plan, iterations=400)
    assert faults[:-1] != parse_all(["random:seed=2,every=4"], plan, iterations=400)
    assert {fault.kind for fault in faults} >= {"slow", "slow_link", "kill", "exception", "hang"}
    assert 60 < len(faults) < 130
    struck = [fault for fault in faults if fault.strikes]
    together = [(a, b) for a in struck for b in struck if a is not b and 0 <= b.at_iteration - a.at_iteration < APART]
    assert together
    assert not [(a, b) for a, b in together if a.rank % 2 == b.rank % 2], "the other rank of its stage"
    per_hour = parse_all(["random:seed=1,rate=llama3,nodes=2048,hours=24"], plan, iterations=100)
    assert 2 < len(per_hour) < 20  # 2,048 nodes: 7.8 a day
    with pytest.raises(FaultError, match="rate=mine is not known, allowed: llama3"):
        parse_all(["random:seed=1,rate=mine,nodes=8,hours=1"], plan, iterations=100)
    with pytest.raises(FaultError, match=r"a fault every 0.1 iterations, allowed: every 0.5 at least"):
        parse_all(["random:seed=1,every=0.1"], plan, iterations=100)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("melt:rank=1,at=2", "unknown kind 'melt', allowed: slow, slow_link, kill, hang, freeze, exception, segfault"),
        ("slow", "'' is not a setting of slow, allowed: rank=, factor=, at=, until=, phase=, ramp=, every=, on=, of="),
        ("kill:rank=1,at=2,factor=2", "'factor=2' is not a setting of kill, allowed: rank=, at=, point="),
        ("kill:rank=1,at=2,point=in_sync,phase=F", "point=in_sync has no chunks, phase= goes with point=compute"),
        ("slow:rank=1,factor=1e309,at=2", "factor=1e309 must be greater than 1 and finite"),
        ("slow:rank=1,factor=2,at=2,every=5", "every= and on= go together, allowed: on= from 1 to one less than every="),
        ("slow:rank=1,factor=2,at=2,every=5,on=5", "every= and on= go together"),
        ("slow:rank=1,factor=2,at=2,ramp=0", "ramp=0 must be 1 or more"),
        ("slow:rank=1,factor=2,at=2,of=disk", "of=disk is not known, allowed: compute, memory"),
        ("slow_link:rank=1,peer=1,delay_ms=2,at=2", "peer=1 is the sender itself"),
        ("slow_link:rank=1,peer=0,delay_ms=-2,at=2", "delay_ms=-2 must be greater than 0"),
        ("freeze:rank=1,at=2,seconds=nan", "seconds=nan must be greater than 0"),
        ("kill:rank=1,at", "'at' is not a setting of kill"),
        ("kill:rank=1", "at= is missing, kill needs rank=, at="),
        ("kill:rank=1,at=2,at=3", "at is given twice"),
        ("kill:rank=8,at=2", "rank=8 must be a whole number from 0 to 7"),
        ("kill:rank=-1,at=2", "rank=-1 must be a whole number from 0 to 7"),
        ("kill:rank=1,at=60", "at=60 must be a whole number from 0 to 59"),
        ("kill:rank=1,at=1.5", "at=1.5 must be a whole number"),
        ("kill:rank=1,at=2,point=later", "point=later is not known, allowed: compute, in_sync, before_barrier, before_step"),
        ("slow:rank=1,factor=1,at=2", "factor=1 must be greater than 1"),
        ("slow:rank=1,factor=nan,at=2", "factor=nan must be greater than 1"),
        ("slow:rank=1,factor=fast,at=2", "factor=fast is not a number"),
        ("slow:rank=1,factor=2,at=9,until=9", "until=9 must be greater than at=9"),
        ("slow:rank=1,factor=2,at=9,phase=X", "phase=X is not known, allowed: F, B"),
    ],
)
def test_a_bad_spec_is_refused_with_what_is_wrong_and_what_is_allowed(text, sentence):
    with pytest.raises(FaultError) as caught:
        parse(text)
    assert sentence in str(caught.value)
    assert text in str(caught.value)


def test_a_rank_dies_once_in_an_iteration():
    with pytest.raises(FaultError, match="two faults end rank 1 in iteration 5"):
        parse_faults(["kill:rank=1,at=5", "slow:rank=1,factor=2,at=1", "freeze:rank=1,at=5"], ranks=2, iterations=10)


def test_the_steady_profile_is_what_its_page_says():
    steady = profile("steady")
    mixed = work_of([100, 100])
    forward = steady.chunk_us("F", mixed, 4, has_head=False)
    assert forward == pytest.approx(22_000, rel=0.03)
    assert steady.chunk_us("B", mixed, 4, has_head=True) == 2 * forward
    long = work_of([256])
    assert steady.chunks["F"].token2_us * long.sum_sq / steady.chunk_us("F", long, 1, has_head=True) == pytest.approx(
        0.25, abs=0.01
    )
    with pytest.raises(ProfileError, match="allowed: steady, long-context"):
        profile("warp")


def test_weights_alone_can_be_slow_where_the_schedule_has_them():
    fault = parse_fault("slow:rank=1,factor=3,at=5,phase=W", ranks=2, iterations=10, schedule="zb-h1")
    assert fault.slowdown("W", 5) == 3
    assert fault.slowdown("B", 5) == 1
    with pytest.raises(FaultError, match="schedule interleaved executes no W"):
        parse_fault("slow:rank=1,factor=3,at=5,phase=W", ranks=2, iterations=10, schedule="interleaved")
