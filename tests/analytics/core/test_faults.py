"""Fault SPECs and device profiles: what is accepted means what it says, what is not is refused in one sentence."""

import pytest

from unskew.analytics.core.device_profiles import ProfileError, profile
from unskew.analytics.core.faults import FaultError, FaultSpec, parse_fault, parse_faults
from unskew.analytics.core.workload import work_of


def parse(text):
    return parse_fault(text, ranks=8, iterations=60)


def test_a_slow_fault_slows_its_phase_in_its_iterations_only():
    fault = parse("slow:rank=3,factor=1.8,at=30,until=40,phase=B")
    assert [fault.slowdown("B", i) for i in (29, 30, 39, 40)] == [1.0, 1.8, 1.8, 1.0]
    assert fault.slowdown("F", 30) == 1.0
    assert parse("slow:rank=3,factor=1.8,at=30").slowdown("F", 59) == 1.8


def test_the_other_kinds():
    assert parse("kill:rank=6,at=7") == FaultSpec(kind="kill", rank=6, at=7, point="compute")
    assert parse("kill:rank=6,at=7,point=before_step").point == "before_step"
    assert parse("hang:rank=0,at=0").slowdown("F", 5) == 1.0
    assert parse("freeze:rank=2,at=50").event().kind == "freeze"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("melt:rank=1,at=2", "unknown kind 'melt', allowed: slow, kill, hang, freeze"),
        ("slow", "'' is not a setting of slow, allowed: rank=, factor=, at=, until=, phase="),
        ("kill:rank=1,at=2,factor=2", "'factor=2' is not a setting of kill, allowed: rank=, at=, point="),
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
