"""The plan of a training that is not ours, which is not issued but found: from what its ranks say of themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from unskew.analytics.core.plan import Hop, Plan, Role, Route
from unskew.collector.events import PipelinePlace, RankAttached

DIFFERENT = frozenset({"pp", "pipe", "pipeline", "stage", "ep", "expert", "experts"})
"""Words in the names of a mesh's dimensions along which ranks do different work."""


def plan_of(attached: Mapping[int, RankAttached], micro_batches: Mapping[int, int]) -> tuple[Plan, str]:
    """What the ranks do, as a plan, a stage of it taken for a layer; and why nobody can be judged by it ("" = they can)."""
    ranks = sorted(attached)
    places = {rank: one.pipeline or PipelinePlace(0, 1, (rank,)) for rank, one in attached.items()}
    pipelines, stages = sorted({place.members for place in places.values()}), places[ranks[0]].stages
    rank_of = {(pipelines.index(place.members), place.stage): rank for rank, place in places.items()}
    why_not = _why_not(attached, pipelines)
    if {*rank_of} != {(replica, stage) for replica in range(len(pipelines)) for stage in range(stages)}:
        why_not = f"{len(ranks)} ranks in {len(pipelines)} pipelines of {stages} stages are not one rank a stage"
        pipelines, stages, rank_of = [(rank,) for rank in ranks], 1, {(place, 0): rank for place, rank in enumerate(ranks)}
    if len({*micro_batches.values()}) > 1 and stages == 1:
        different = sorted({*micro_batches.values()})
        why_not = why_not or f"the ranks have different numbers of micro-batches in an iteration ({different})"
    each = max(micro_batches.values()) if stages == 1 else -(-sum(micro_batches.values()) // len(pipelines))
    roles = tuple(
        Role(rank=rank, replica=replica, stage=stage, first_layer=stage, n_layers=1)
        for (replica, stage), rank in sorted(rank_of.items(), key=lambda item: item[1])
    )
    hops = [
        tuple(Hop(first_layer=stage, n_layers=1, ranks=(rank_of[replica, stage],)) for stage in range(stages))
        for replica in range(len(pipelines))
    ]
    routes = tuple(
        Route(micro_batch=number, replica=number % len(pipelines), hops=hops[number % len(pipelines)])
        for number in range(each * len(pipelines))
    )
    return Plan(plan_version=0, n_layers=stages, schedule="1f1b", roles=roles, routes=routes), why_not


def _why_not(attached: Mapping[int, RankAttached], pipelines: Sequence[tuple[int, ...]]) -> str:
    if any(one.on_gpu and not one.gpu for one in attached.values()):
        return "the ranks use GPUs, and their times are the host's: what it takes is no measure of the GPUs' work"
    if any(one.gpu and (one.pipeline or one.groups) for one in attached.values()):
        return "of ranks on GPUs only plain data parallelism is judged so far: in groups, waits were never measured there"
    if len({one.on_gpu for one in attached.values()}) > 1:
        return "some ranks use GPUs and some do not: nothing says how much either should take"
    times_of = Counter(one.gpu for one in attached.values() if one.gpu)
    if sharing := sorted(rank for rank, one in attached.items() if times_of[one.gpu] > 1):
        return f"ranks {sharing} share a GPU: each takes of its time from another, and nothing says how much"
    groups = {group for one in attached.values() for group in one.groups}
    if any(one.pipeline for one in attached.values()):
        of = {rank: one.pipeline.stage if one.pipeline else None for rank, one in attached.items()}
        groups -= {*pipelines, *(group for group in groups if len({of.get(rank) for rank in group}) == 1)}
    elif _do_the_same(attached.values()):
        groups = set()
    if groups:
        some = ", ".join(str(list(group)) for group in sorted(groups)[:3])
        return f"the ranks are in several process groups ({some}), and which of them do the same work is not known"
    return "; ".join(sorted({sentence for one in attached.values() for sentence in one.off}))


def _do_the_same(attached: Collection[RankAttached]) -> bool:
    """Whether all groups are those of a mesh whose ranks share layers or data, so that each does the same work: each rank is in
    as many groups, of the same dimensions and sizes, and none of these holds stages or experts."""
    shapes = {tuple(sorted((name, len(of)) for name, of in zip(one.dimensions, one.groups, strict=False))) for one in attached}
    names = {name for shape in shapes for name, _ in shape}
    complete = all(len(one.dimensions) == len(one.groups) for one in attached)
    return complete and len(shapes) == 1 and "" not in names and not any(DIFFERENT & {*name.split("_")} for name in names)
