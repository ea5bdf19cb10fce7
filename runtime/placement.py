"""What ranks compute on: a core or a GPU each, one that they share, or a device that is emulated."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import msgspec

from unskew.analytics.core.device_profiles import profiles_of
from unskew.collector.events import DeviceKind
from unskew.runtime.options import MOST_RANKS, AskedDevice, OptionsError, RunOptions


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def computes_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this node's cores have products of bfloat16; without them a layer takes fifteen times as long as in float32."""
    return cpuinfo.exists() and re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpuinfo.read_text()) is not None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which kind of device the ranks get, and the sentence that gives the reason. `gpus`: rank r computes on GPU r modulo so
    many, 0 = on a core; `shares_gpus`: ranks share them; `classes`: each rank's class of device (its GPU's model, `cpu`, or the
    profile that it emulates); `most_ranks`: for so many there is a place, ranks that are added among them; `rank_bytes`: the
    memory that each has, None = unknown."""

    device: AskedDevice
    why: str
    gpus: int = 0
    shares_gpus: bool = False
    classes: tuple[str, ...] = ()
    most_ranks: int = 0
    rank_bytes: int | None = None

    @property
    def kind(self) -> DeviceKind:
        """What executes, for the log."""
        if self.device in {"sleep", "virtual"}:
            return "sleep" if self.device == "sleep" else "virtual"
        if self.gpus:
            return "shared_gpus" if self.shares_gpus else "gpus"
        return "cores"

    def gpu_of(self, rank: int) -> int | None:
        """Where a rank computes; None = on a core."""
        return rank % self.gpus if self.gpus else None


def place(options: RunOptions, gpus: int, gpu_models: Sequence[tuple[str, int]] = ()) -> Placement:
    """``--device auto`` is real when every rank has its own GPU or its own core, else sleep. Raises `OptionsError` where a GPU
    is asked for and there is none, or a format that the cores do not compute."""
    placement = _place(options, gpus)
    if options.dtype == "bfloat16" and placement.kind == "cores" and not computes_bfloat16():
        raise OptionsError(
            "--dtype bfloat16 needs cores that compute it and this node's do not, allowed: float32, float64, or --device gpu, "
            "sleep, virtual"
        )
    models = [gpu_models[rank % gpus] for rank in range(options.ranks)] if gpu_models and placement.gpus else []
    if placement.device != "real":
        classes = profiles_of(options.profile, options.ranks)
    elif placement.gpus:
        classes = tuple(model for model, _ in models) or ("gpu",) * options.ranks
    else:
        classes = ("cpu",) * options.ranks
    places = {"gpus": gpus, "shared_gpus": options.ranks, "cores": max(cores(), options.ranks)}
    rank_bytes: int | None
    if options.rank_mib:
        rank_bytes = options.rank_mib * 2**20
    elif placement.gpus:
        rank_bytes = min((own // ceil(options.ranks / gpus) for _, own in models), default=None)
    else:
        rank_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // options.ranks
    most_ranks = places.get(placement.kind, MOST_RANKS)
    return msgspec.structs.replace(placement, classes=classes, most_ranks=most_ranks, rank_bytes=rank_bytes)


def _place(options: RunOptions, gpus: int) -> Placement:
    ranks, alone = options.ranks, options.ranks <= gpus
    own = f"{gpus} GPUs" if alone else f"{cores()} cores"
    if options.device == "gpu":
        if not gpus:
            raise OptionsError("--device gpu needs a GPU and this node has none, allowed: auto, real, sleep, virtual")
        why = f"real: {ranks} ranks on {own}" if alone else f"real: {ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}"
        return Placement(device="real", gpus=gpus, shares_gpus=not alone, why=f"{why}, as asked")
    if options.device == "real":
        return Placement(device="real", gpus=gpus * alone, why=f"real, as asked: {ranks} ranks on {own}")
    if options.device != "auto":
        return Placement(device=options.device, why=f"{options.device}, as asked")
    if options.prices_links or options.costs_of is not None:
        what = "links are emulated between" if options.prices_links else "costs of layers are emulated on"
        return Placement(device="sleep", why=f"sleep: {what} emulated devices alone")
    if alone or ranks <= cores():
        return Placement(device="real", gpus=gpus * alone, why=f"real: {ranks} ranks on {own}")
    why = f"sleep: {ranks} ranks have only {cores()} cores, chunk times of profile {options.profile} are emulated"
    return Placement(device="sleep", why=why)
