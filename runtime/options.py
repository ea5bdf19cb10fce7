"""The options of a run: what `unskew run` was asked for (what it allows: control/allowed.py)."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import msgspec

from unskew.analytics.core.device_profiles import profile, profiles_of
from unskew.analytics.core.plan import Plan
from unskew.analytics.shards.together import LayerSums
from unskew.collector.events import DetectorMethod, Fault, Mode
from unskew.runtime.size import ModelSize

if TYPE_CHECKING:
    from unskew.analytics.planners.degrees import Degrees

AskedDevice = Literal["auto", "real", "gpu", "sleep", "virtual"]
DType = Literal["float32", "float64", "bfloat16"]
Sends = Literal["overlapped", "blocking"]
Ends = Literal["joined", "apart"]
Recovery = Literal["in-step", "redo", "ft-hsdp"]
WhenStuck = Literal["stop", "wait"]
MOST_RANKS = 1_024
MOST_BUCKET_BYTES = 25 * 2**20
"""What is reduced by the time of a death is kept, so all at once would be too much."""


LAYOUT, MATHS, DEVICE, FAULTS = "Layout", "Maths and data", "Device", "Faults and decisions"
CHECKPOINTS = "Checkpoints"
"""The panels of the help page."""


class OptionsError(ValueError):
    """A bad option; the message is one sentence: what is wrong, what is allowed."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """How a person is asked for a field of `RunOptions`: the command line is built from this, and `check` reads the bound.

    `least`, `most`: the lowest and highest value that are allowed. `metavar`: what stands for the value in the help. `default`:
    what happens without the option, in words, where the field's default does not say it.
    """

    help: str
    panel: str
    least: int | None = None
    most: int | None = None
    metavar: str | None = None
    default: str | None = None


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a run begins with: that of `run` after `iterations` iterations. `positions`: how many batches of its
    stream each replica had trained by then, where these are not as many as iterations."""

    run: str
    iterations: int
    positions: tuple[int, ...] = ()


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines a run, in the order of the help page. `store` None = the default store.

    `instrument_turns`: ranks record spans in blocks of so many iterations, in turns with none (0 = always); the overhead is
    measured so. `layer_weights`, `shapes`, `kept`, `kept_cut`: of a model of somebody's own, what was measured of its layers
    (own_model.py): what each costs (with `costs_of` that model's), what it gives to the next for every token, how many numbers
    every member of a tensor-parallel group keeps of one for its backward pass, and how many they divide. `units`: in how many
    it can be cut, `layer_sums`: how many sums each layer has then.
    """

    tp: Annotated[int, Parameter(help="Tensor-parallel shards of a stage.", panel=LAYOUT, least=1, most=1_024)] = 1
    pp: Annotated[int, Parameter(help="Pipeline stages.", panel=LAYOUT, least=1, most=1_024)] = 4
    dp: Annotated[int, Parameter(help="Replicas.", panel=LAYOUT, least=1, most=1_024)] = 2
    degrees: Annotated[
        str | None,
        Parameter(
            help="Tensor-parallel shards of each stage where these differ, replicas apart by a slash: 2,1/1,1. In place of "
            "--tp, --pp and --dp.",
            panel=LAYOUT,
            metavar="LIST",
            default="all stages have --tp",
        ),
    ] = None
    schedule: Annotated[
        str, Parameter(help="Order of the chunks: gpipe, 1f1b, interleaved, zb-h1, zb-v or searched.", panel=LAYOUT)
    ] = "1f1b"
    layers: Annotated[int, Parameter(help="Layers of the model.", panel=MATHS, least=1, most=10_000)] = 16
    dim: Annotated[int, Parameter(help="Width of the model.", panel=MATHS, least=8, most=65_536)] = 32
    heads: Annotated[int, Parameter(help="Attention heads.", panel=MATHS, least=1, most=1_024)] = 2
    ends: Annotated[
        Ends,
        Parameter(
            help="Embedding and output head belong to the first and the last layer (joined), or are layers of their own that "
            "plans place (apart).",
            panel=MATHS,
        ),
    ] = "joined"
    tokens: Annotated[int, Parameter(help="Most tokens of a micro-batch.", panel=MATHS, least=16, most=1_048_576)] = 256
    micro_batches: Annotated[int, Parameter(help="Micro-batches of an iteration.", panel=MATHS, least=1, most=65_536)] = 16
    iterations: Annotated[int, Parameter(help="Iterations to train.", panel=MATHS, least=1, most=10_000_000)] = 150
    seed: Annotated[int, Parameter(help="Seed of weights and batches.", panel=MATHS, least=0, most=2**32 - 1)] = 0
    dtype: Annotated[
        DType,
        Parameter(
            help="Number format; bfloat16 is for products alone: weights, moments and sums of gradients are float32.",
            panel=MATHS,
            default="float32; float64 with --verify",
        ),
    ] = "float32"
    model: Annotated[
        str | None,
        Parameter(
            help="A model of your own, a list of modules: module:function or file.py:function.",
            panel=MATHS,
            metavar="NAME",
            default="a small Llama of --layers, --dim and --heads",
        ),
    ] = None
    costs_of: Annotated[
        str | None,
        Parameter(
            help="The model whose layers say how many layers there are, ends apart, and what emulated devices take for each "
            "(nemotron-h-8b, gemma2-9b, deepseek-like, ...).",
            panel=MATHS,
            metavar="NAME",
            default="--layers, all the same",
        ),
    ] = None
    data: Annotated[
        str | None,
        Parameter(
            help="Data of your own, documents or packed batches: module:function or file.py:function.",
            panel=MATHS,
            metavar="NAME",
            default="the corpus",
        ),
    ] = None
    corpus: Annotated[
        str | None,
        Parameter(help="A folder of text files.", panel=MATHS, metavar="PATH", default="the standard library's sources"),
    ] = None
    device: Annotated[
        AskedDevice,
        Parameter(help="What executes: auto = real when each rank has a core or GPU; gpu = ranks may share one.", panel=DEVICE),
    ] = "auto"
    profile: Annotated[
        str,
        Parameter(
            help="The device that sleep and virtual emulate; for some ranks another: steady,4-7=older.",
            panel=DEVICE,
            metavar="NAME",
        ),
    ] = "steady"
    link_us: Annotated[
        int, Parameter(help="Microseconds a message is on its way between emulated devices.", panel=DEVICE, least=0, most=10**7)
    ] = 0
    link_mbps: Annotated[
        int, Parameter(help="Mbit/s of a link between emulated devices; 0 = without limit.", panel=DEVICE, least=0, most=10**7)
    ] = 0
    rank_mib: Annotated[
        int,
        Parameter(
            help="Memory of a rank in MiB; no plan gives it more layers than there is room for.",
            panel=DEVICE,
            least=0,
            most=10**8,
            default="its GPU's, or its part of this machine's",
        ),
    ] = 0
    sends: Annotated[
        Sends,
        Parameter(
            help="On emulated devices a sender goes on at once (overlapped), or when its message has arrived (blocking).",
            panel=DEVICE,
        ),
    ] = "overlapped"
    mode: Annotated[Mode, Parameter(help="Optional changes of plan: left, asked for, or applied.", panel=FAULTS)] = "auto"
    policy: Annotated[
        str,
        Parameter(
            help="Who decides on plans: unskew (the Scheduler), or a policy as the simulator plays it (recycle, oobleck, "
            "malleus, ntp, resihp, resihp-tp, recover, ft-hsdp, greyhound, adaptra).",
            panel=FAULTS,
            metavar="NAME",
        ),
    ] = "unskew"
    detector: Annotated[
        DetectorMethod,
        Parameter(help="Who decides that a device is slow: unskew, or resihp, as its paper has it.", panel=FAULTS),
    ] = "unskew"
    faults: tuple[Fault, ...] = ()
    verify: Annotated[bool, Parameter(help="Also run the same seed without faults and compare the losses.", panel=FAULTS)] = (
        False
    )
    recovery: Annotated[
        Recovery,
        Parameter(
            help="When a rank is lost: its iteration goes on with what the others hold (in-step), or is redone (redo); or its "
            "replica leaves and the others go on with their own batches (ft-hsdp).",
            panel=FAULTS,
        ),
    ] = "in-step"
    respawns: Annotated[
        int,
        Parameter(help="How often mode auto starts a lost rank again; 0 = never.", panel=FAULTS, least=0, most=1_000),
    ] = 3
    checkpoint_every: Annotated[
        int, Parameter(help="Iterations from one checkpoint to the next; 0 = none.", panel=CHECKPOINTS, least=0)
    ] = 10
    when_stuck: Annotated[
        WhenStuck,
        Parameter(
            help="When nobody lives who holds some layer: stop, or wait for ranks and go on from the newest checkpoint.",
            panel=CHECKPOINTS,
        ),
    ] = "stop"
    controller_wait: Annotated[
        int,
        Parameter(
            help="Seconds that ranks wait for --resume after their controller was killed; 0 = they end with it.",
            panel=CHECKPOINTS,
            least=0,
            most=86_400,
        ),
    ] = 30
    resume: ResumePoint | None = None
    store: str | None = None
    instrument_turns: int = 0
    layer_weights: tuple[float, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    kept: tuple[int, ...] = ()
    kept_cut: tuple[int, ...] = ()
    layer_sums: LayerSums = ()
    units: int = 0

    @property
    def first_iteration(self) -> int:
        return self.resume.iterations if self.resume is not None else 0

    @property
    def stored(self) -> Literal["float32", "float64"]:
        """The format of weights, moments, gradients, and of what layers give to each other."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    @property
    def n_layers(self) -> int:
        """Those that plans place."""
        return self.layers + 2 * (self.ends == "apart")

    @property
    def size(self) -> ModelSize:
        """Of our own model."""
        return ModelSize(n_layers=self.n_layers, dim=self.dim, heads=self.heads, ends_apart=self.ends == "apart")

    @property
    def ranks(self) -> int:
        return sum(map(sum, self.stages))

    @property
    def stages(self) -> Degrees:
        """[replica][stage]: how many ranks execute it as one. Raises `OptionsError`."""
        return degrees_of(self.degrees) if self.degrees is not None else ((self.tp,) * self.pp,) * self.dp

    def with_degrees(self) -> RunOptions:
        """With the most shards and stages, and the replicas, that `degrees` says: all of a layout in which every stage has as
        many. Raises `OptionsError`."""
        if self.degrees is None:
            return self
        of = self.stages
        found = msgspec.structs.replace(self, tp=max(map(max, of)), pp=max(map(len, of)), dp=len(of))
        even = msgspec.structs.replace(found, degrees=None)
        return even if even.stages == of else found

    def within(self, ranks: int) -> RunOptions | None:
        """With those of its replicas that so many ranks make up, the largest first; None where they make up none."""
        kept = []
        for stages in sorted(self.stages, key=sum, reverse=True):
            if sum(stages) <= ranks:
                kept.append(stages)
                ranks -= sum(stages)
        if not kept or self.degrees is None:
            return msgspec.structs.replace(self, dp=len(kept)) if kept else None
        written = "/".join(",".join(map(str, stages)) for stages in kept)
        return msgspec.structs.replace(self, degrees=written).with_degrees()

    @property
    def asked_degree(self) -> str:
        """How somebody asked for the largest group."""
        return f"--tp {self.tp}" if self.degrees is None else f"--degrees {self.degrees}"

    def with_costs(self) -> RunOptions:
        """With the layers of the model that `costs_of` names. Raises `OptionsError`."""
        if self.costs_of is None:
            return self
        from unskew.analytics.pipeline.model_profiles import MODELS  # noqa: PLC0415 - numpy again

        if self.costs_of not in MODELS:
            raise OptionsError(f"--costs-of {self.costs_of} is not known, allowed: {', '.join(MODELS)}")
        if self.model is not None:
            raise OptionsError("--costs-of is not for --model, whose layers cost what was measured of them")
        if self.device in ("real", "gpu"):
            raise OptionsError("--costs-of is what emulated devices take, allowed: with --device sleep, virtual or auto")
        weights = MODELS[self.costs_of].layer_weights()
        if self.layers not in (RunOptions().layers, len(weights) - 2):
            raise OptionsError(f"--layers {self.layers} is not for --costs-of {self.costs_of}, which has {len(weights) - 2}")
        return msgspec.structs.replace(self, layers=len(weights) - 2, ends="apart", layer_weights=weights)

    @property
    def prices_links(self) -> bool:
        """Whether messages between emulated devices cost anything."""
        return bool(self.link_us or self.link_mbps or self.sends == "blocking")

    @property
    def prices_sums(self) -> bool:
        """Whether sums of gradients between emulated devices cost anything; a replica's own rules know no such price."""
        return bool(self.link_us or self.link_mbps) and self.recovery != "ft-hsdp"

    @property
    def link_token_us(self) -> float:
        """How long a token's hidden state, of the widest that layers give on, occupies a link."""
        if not self.link_mbps:
            return 0.0
        return 8 * (8 if self.stored == "float64" else 4) * max(map(math.prod, self.given_on)) / self.link_mbps

    @property
    def bucket_bytes(self) -> int:
        """A bucket of gradients is at least so large; over slow links no larger than that a fifth of its time is latency."""
        if not self.prices_sums or not self.link_mbps:
            return MOST_BUCKET_BYTES
        return min(MOST_BUCKET_BYTES, self.link_us * self.link_mbps)

    @property
    def given_on(self) -> tuple[tuple[int, ...], ...]:
        """Of what each layer gives to the next, the shape for every token."""
        return self.shapes or ((self.dim,),) * self.n_layers

    def first_plan(self) -> Plan:
        """The plan the run starts with. Raises `PlanError` for an impossible layout."""
        from unskew.analytics.core.layout import uniform_plan  # noqa: PLC0415 - numpy, which most commands start without

        weights = self.layer_weights or self.size.layer_weights
        units = self.heads if self.model is None else max(self.units, 1)
        if self.degrees is not None or (self.policy == "unskew" and 1 < self.tp < units and units % self.tp):
            from unskew.analytics.planners.degrees import plan_of_degrees  # noqa: PLC0415 - numpy again

            return plan_of_degrees(
                self.stages,
                units=units,
                n_layers=self.n_layers,
                micro_batches=self.micro_batches,
                schedule=self.schedule,
                layer_weights=weights,
            )
        if self.schedule == "searched" and self.tp == 1 and min(self.pp, self.dp) > 0:
            from unskew.analytics.planners.adaptis.searched import searched_plan  # noqa: PLC0415  (0.3 s)

            cost = profile(profiles_of(self.profile, self.ranks)[0])
            return searched_plan(
                pp=self.pp,
                dp=self.dp,
                n_layers=self.n_layers,
                micro_batches=self.micro_batches,
                cost=msgspec.structs.replace(
                    cost, message_us=cost.message_us + self.link_us, message_token_us=self.link_token_us
                ),
                tokens=self.tokens,
                layer_weights=weights,
            )
        return uniform_plan(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            n_layers=self.n_layers,
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            layer_weights=weights,
        )


def degrees_of(text: str) -> Degrees:
    """What `--degrees` says. Raises `OptionsError`.

    >>> degrees_of("3,2/2,2,1")
    ((3, 2), (2, 2, 1))
    """
    replicas = [stages.split(",") for stages in text.split("/")]
    for one in (one for stages in replicas for one in stages):
        if not re.fullmatch(r" *[1-9][0-9]{0,3} *", one, re.ASCII):
            raise OptionsError(f"--degrees {text}: {one or 'nothing'} is no number of shards, allowed: such as 2,1 or 2,1/1,1")
    return tuple(tuple(map(int, stages)) for stages in replicas)


def asked_for(options: type[msgspec.Struct]) -> dict[str, tuple[Any, Parameter]]:
    """The fields that a person is asked for: name -> its type, and how."""
    annotated = {field.name: field.type for field in msgspec.structs.fields(options) if get_origin(field.type) is Annotated}
    return {name: (get_args(of)[0], get_args(of)[1]) for name, of in annotated.items()}
