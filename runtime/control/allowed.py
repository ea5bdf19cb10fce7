"""Which options a run allows: what cannot be is refused in one sentence before anything starts."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal, get_args, get_origin

from unskew.analytics.core.device_profiles import ProfileError, profiles_of
from unskew.analytics.core.plan import PlanError
from unskew.runtime.options import MOST_RANKS, OptionsError, RunOptions, asked_for

LAYOUT_OF_DEGREES = ("tp", "pp", "dp")
"""The options that `degrees` stands for."""


def check(options: RunOptions) -> None:
    """Raise `OptionsError` when the run cannot be as asked."""
    _check_bounds(options)
    if options.ranks > MOST_RANKS:
        flags = "--tp x --pp x --dp" if options.degrees is None else options.asked_degree
        raise OptionsError(f"{flags} are {options.ranks:,} ranks, allowed on one node: {MOST_RANKS:,}")
    if options.device in ("real", "gpu") and options.prices_links:
        raise OptionsError("--link-us, --link-mbps and --sends emulate links, allowed: with --device sleep, virtual or auto")
    if options.dim % (2 * options.heads):
        raise OptionsError(
            f"--dim {options.dim} does not give --heads {options.heads} an even width, allowed: a multiple of 2 x heads"
        )
    if options.verify and options.dtype == "bfloat16":
        raise OptionsError("--dtype bfloat16 rounds too much for --verify to compare losses, allowed: float32, float64")
    if options.ends == "apart" and options.model is not None:
        raise OptionsError("--ends apart is not for --model, whose layers are those that it gives")
    _check_tensor_parallel(options)
    _check_policy(options)
    if options.recovery == "ft-hsdp" and options.schedule == "searched":
        raise OptionsError("--recovery ft-hsdp leaves out whole replicas, which --schedule searched has no order for")
    if options.corpus is not None:
        from unskew.runtime.corpus import check_folder  # noqa: PLC0415 - numpy again

        check_folder(Path(options.corpus))
    try:
        profiles_of(options.profile, options.ranks)
        options.first_plan()
    except (PlanError, ProfileError) as error:
        sentence = str(error)
        if options.degrees is not None:
            sentence = f"{options.asked_degree}: " + re.sub(r"\b(pp|dp)=", "the ", sentence)
        raise OptionsError(_with_flags(sentence)) from None


def _check_bounds(options: RunOptions) -> None:
    for name, (kind, parameter) in asked_for(RunOptions).items():
        value = getattr(options, name)
        if options.degrees is not None and name in LAYOUT_OF_DEGREES:
            continue
        if parameter.least is not None and value < parameter.least:
            raise OptionsError(f"{_flag(name)} {value} is too small, allowed: {parameter.least} or more")
        if parameter.most is not None and value > parameter.most:
            raise OptionsError(f"{_flag(name)} {value} is too large, allowed: {parameter.most} or less")
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise OptionsError(f"{_flag(name)} {value} is not known, allowed: {', '.join(get_args(kind))}")


def check_together(asked: Collection[str]) -> None:
    """Raise `OptionsError` for options, asked for by these names, of which one says what the other does."""
    if "degrees" in asked and (others := [name for name in LAYOUT_OF_DEGREES if name in asked]):
        raise OptionsError(f"{_flag(others[0])} and --degrees contradict each other: give one of them")


def _check_policy(options: RunOptions) -> None:
    from unskew.analytics.policies.executable import refusal  # noqa: PLC0415 - numpy again

    if wrong := refusal(options.policy, schedule=options.schedule, by_replica=options.recovery == "ft-hsdp"):
        raise OptionsError(_with_flags(wrong))


def _check_tensor_parallel(options: RunOptions) -> None:
    asked = options.asked_degree
    if options.model is None and options.tp > options.heads:
        raise OptionsError(
            f"{asked} leaves a shard without a head, allowed with --heads {options.heads}: {options.heads} or less"
        )
    if (options.tp > 1 or options.degrees is not None) and options.schedule == "searched":
        raise OptionsError(f"{asked} is not for --schedule searched, whose orders are found for single ranks")
    if (options.tp > 1 or options.degrees is not None) and options.recovery == "ft-hsdp":
        raise OptionsError(f"{asked} is not for --recovery ft-hsdp, whose replicas are pipelines of single ranks")
    if options.degrees is not None and options.policy != "unskew":
        raise OptionsError(f"{asked} is not for --policy {options.policy}, which plans for stages of one size")


def _with_flags(sentence: str) -> str:
    """``layers=3`` as the command line has it: ``--layers 3``."""
    asked = asked_for(RunOptions)
    return re.sub(r"\b(\w+)=(\S+)", lambda one: f"{_flag(one[1])} {one[2]}" if one[1] in asked else one[0], sentence)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
