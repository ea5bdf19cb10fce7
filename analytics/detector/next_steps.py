"""What to do about a verdict, in words: only what can be done there. They stand in its evidence, so every face has the same."""

from __future__ import annotations

import msgspec

from unskew.collector.events import DeviceKind, Verdict

NEXT_STEP: dict[str, str] = {
    "slow_device": "measure the device by itself beside others of its kind; drain it when it comes again",
    "slow_link": "test the link pairwise, then cable, port and switch; keep gradient rings off it until then",
    "dead": "nothing at once: the survivors took over; replace the device before the next failure",
    "hung": "read the stacks of the culprit and its last collective; restart it when it does not come back",
    "long_sequences": "balance micro-batches over replicas by the sum of squared lengths, not by tokens",
    "stage_imbalance": "move layers away from the costly stage (its head or embedding counts as layers)",
    "input_bound": "more loader workers or a longer prefetch; look at the storage of the ranks that waited",
    "gc_pause": "collect on all ranks at the same iterations (gc.disable, then gc.collect every few hundred)",
    "unknown": "record chunk times (forward and backward per micro-batch) or probe the devices: iteration times name nobody",
}
WATCHED: dict[str, str] = {
    "slow_device": "give it fewer samples (session.balance) or have it replaced; drain it when it comes again",
    "dead": "read what it printed last, and its machine's kernel log where a signal ended it; restart from a checkpoint",
    "long_sequences": "balance the lengths over the ranks: for batch in session.balance(loader, length=...)",
}
"""Of a training that is not ours: nobody takes over there, and its loop lets samples be divided by one line."""
NOBODY_TOOK_OVER = (
    "start a rank in its place by `unskew rank add` where the run waits for one; where it has ended, resume it from its newest "
    "checkpoint"
)
"""Of a death after which no plan came: the last who held its layers, or a mode in which nothing is changed."""
BESIDE = "look at what it does in each step beside the passes: logging, copies, checkpoints, other programs on its machine"
"""Of a rank whose passes are as fast as the others'."""
PROBE = "run `unskew probe` on the device, or give it less; drain it when it comes again"
"""What to do about a slow device while the run goes on."""
PASSES = {"F", "B", "W"}


def with_next_step(verdict: Verdict, *, can_be_probed: bool, watched: bool = False, taken_over: bool = True) -> Verdict:
    """The verdict with what to do about it, where it does not say so itself. `taken_over`: others do what the dead did."""
    if "next_step" in verdict.evidence:
        return verdict
    step = {**NEXT_STEP, **(WATCHED if watched else {})}[verdict.cause]
    if watched and verdict.speed and not PASSES & {*verdict.speed}:
        step = BESIDE
    elif verdict.cause == "dead" and not taken_over:
        step = NOBODY_TOOK_OVER
    elif verdict.cause == "slow_device" and can_be_probed:
        step = f"measure it by unskew probe while it trains; {step}" if watched else PROBE
    return msgspec.structs.replace(verdict, evidence={"next_step": step, **verdict.evidence})


def answers_probes(device_kind: DeviceKind | None, ranks: int) -> bool:
    """Whether a training that is not ours has ranks that can be measured beside each other while it goes on."""
    return ranks > 1 and device_kind not in {"gpus", "shared_gpus"}
