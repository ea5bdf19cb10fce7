"""The options of a run: what `unskew run` was asked for, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from unskew.analytics.core.device_profiles import profile, profiles_of
from unskew.analytics.core.faults import FaultSpec
from unskew.analytics.core.plan import Plan, uniform_plan
from unskew.collector.events import Mode
from unskew.runtime.corpus import check_folder

DeviceKind = Literal["auto", "real", "sleep", "virtual"]
DType = Literal["float32", "float64"]


class OptionsError(ValueError):
    """A bad option; the message is one sentence: what is wrong, what is allowed."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines a run. `corpus` None = the standard library's sources, `store` None = the default store.

    `instrument_turns`: ranks record spans in blocks of so many iterations, in turns with none (0 = always); the overhead is
    measured so.
    """

    tp: int = 1
    pp: int = 4
    dp: int = 2
    layers: int = 16
    dim: int = 32
    heads: int = 2
    tokens: int = 256
    micro_batches: int = 16
    iterations: int = 150
    seed: int = 0
    schedule: str = "1f1b"
    device: DeviceKind = "auto"
    profile: str = "steady"
    corpus: str | None = None
    store: str | None = None
    mode: Mode = "auto"
    faults: tuple[FaultSpec, ...] = ()
    dtype: DType = "float32"
    verify: bool = False
    instrument_turns: int = 0

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def first_plan(self) -> Plan:
        """The plan the run starts with. Raises `PlanError` for an impossible layout."""
        if self.schedule == "searched" and self.tp == 1 and min(self.pp, self.dp) > 0:
            from unskew.analytics.planners.adaptis.searched import searched_plan  # noqa: PLC0415  (its solver takes 0.3 s to import,

            return searched_plan(
                pp=self.pp,
                dp=self.dp,
                n_layers=self.layers,
                micro_batches=self.micro_batches,
                cost=profile(profiles_of(self.profile, self.ranks)[0]),
                tokens=self.tokens,
            )
        return uniform_plan(
            tp=self.tp, pp=self.pp, dp=self.dp, n_layers=self.layers, micro_batches=self.micro_batches, schedule=self.schedule
        )


def check(options: RunOptions) -> None:
    """Raise `OptionsError`, `PlanError` or `ProfileError` (all `ValueError`) when the run cannot be as asked."""
    for name, least in (("layers", 1), ("dim", 8), ("heads", 1), ("tokens", 16), ("micro_batches", 1), ("iterations", 1)):
        if getattr(options, name) < least:
            raise OptionsError(f"--{name.replace('_', '-')} {getattr(options, name)} is too small, allowed: {least} or more")
    for name, kind in (("device", DeviceKind), ("dtype", DType), ("mode", Mode)):
        if getattr(options, name) not in get_args(kind):
            raise OptionsError(f"--{name} {getattr(options, name)} is not known, allowed: {', '.join(get_args(kind))}")
    if options.dim % (2 * options.heads):
        raise OptionsError(
            f"--dim {options.dim} does not give --heads {options.heads} an even width, allowed: a multiple of 2 x heads"
        )
    if options.corpus is not None:
        check_folder(Path(options.corpus))
    options.first_plan()
    profiles_of(options.profile, options.ranks)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which kind of device the ranks get, whether rank r computes on GPU r, and the sentence that gives the reason;
    `classes`: each rank's class of device (its GPU's model, `cpu`, or the profile that it emulates)."""

    device: DeviceKind
    on_gpus: bool
    why: str
    classes: tuple[str, ...] = ()


def place(options: RunOptions, gpus: int, gpu_models: Sequence[str] = ()) -> Placement:
    """``--device auto`` is real when every rank has its own GPU or its own core, else sleep."""
    placement = _place(options, gpus)
    if placement.device != "real":
        classes = profiles_of(options.profile, options.ranks)
    elif placement.on_gpus:
        classes = tuple(gpu_models[: options.ranks]) or ("gpu",) * options.ranks
    else:
        classes = ("cpu",) * options.ranks
    return msgspec.structs.replace(placement, classes=classes)


def _place(options: RunOptions, gpus: int) -> Placement:
    own = f"{gpus} GPUs" if options.ranks <= gpus else f"{cores()} cores"
    on_gpus = options.ranks <= gpus
    if options.device == "real":
        return Placement(device="real", on_gpus=on_gpus, why=f"real, as asked: {options.ranks} ranks on {own}")
    if options.device != "auto":
        return Placement(device=options.device, on_gpus=False, why=f"{options.device}, as asked")
    if on_gpus or options.ranks <= cores():
        return Placement(device="real", on_gpus=on_gpus, why=f"real: {options.ranks} ranks on {own}")
    why = f"sleep: {options.ranks} ranks have only {cores()} cores, chunk times of profile {options.profile} are emulated"
    return Placement(device="sleep", on_gpus=False, why=why)
