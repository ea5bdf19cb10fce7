"""What ByteDance's analyser asks of a trace, restated: it asserts each of these, or ends in a missing key.

Their model of dependencies is built from the first step of replica 0 and held against all others. Times are seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import polars

FORWARD, BACKWARD = "forward-compute", "backward-compute"
MESSAGES = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""Towards which stage the other side is."""
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
EMBEDDING, CLIP = "embedding-grads-all-reduce", "optimizer-clip-main-grad"
AFTER = ("gc", "layernorm-grads-all-reduce", EMBEDDING, CLIP, "optimizer")
TOLERANCE = 1e-5
"""Of times of 32 bits. Theirs is 10 ms, beyond which they refuse, or warn and go on with 0."""
CLOCKS = 5e-5


class Op(NamedTuple):
    name: str
    number: int
    stage: int


Times = Mapping[Op, tuple[float, float]]


def broken(rows: polars.DataFrame, tolerance: float = TOLERANCE) -> list[str]:
    """The rules that a trace breaks, a sentence each."""
    if found := list(_table(rows)):
        return found
    rows = rows.with_columns(polars.col("optype").cast(polars.String))
    model = rows.filter((polars.col("step") == rows["step"].min()) & (polars.col("dp_rank") == 0))
    replicas, stages = rows["dp_rank"].n_unique(), rows["stage"].n_unique()
    times = _times(model)
    if found := [*_everywhere(rows, replicas), *_complete(Counter((op.name, op.stage) for op in times), replicas, stages)]:
        return found
    chunks = {Op(name, number, stage): gmc for name, number, stage, gmc in model.select(*_OP, "gmc").iter_rows()}
    model_graph = _Dependencies(times, chunks, replicas, stages)
    if model_graph.found or (found := model_graph.circle()):
        return model_graph.found or found
    for (step, dp_rank), part in rows.group_by("step", "dp_rank", maintain_order=True):
        found += (
            f"step {step}, replica {dp_rank}: {sentence}" for sentence in model_graph.out_of_order(_times(part), tolerance)
        )
    for (step, *op), part in rows.filter(polars.col("optype").is_in([GATHER, SCATTER, SEPARATE, CLIP])).group_by("step", *_OP):
        if (part["start_ts"] + part["duration"]).min() < part["start_ts"].max() - tolerance:  # type: ignore[operator]
            found.append(f"step {step}: a replica ends {op} before another begins it")
    return found


_OP = ("optype", "seq_id", "stage")


def _times(rows: polars.DataFrame) -> Times:
    columns = rows.select(*_OP, "start_ts", "duration").iter_rows()
    return {Op(name, number, stage): (start, start + wall) for name, number, stage, start, wall in columns}


def _table(rows: polars.DataFrame) -> Iterator[str]:
    if rows.schema["optype"] != polars.Categorical:
        yield "optype is no category"
    if any(column.null_count() for column in rows):
        yield "a value is missing"
    for name in ("dp_rank", "stage"):
        if sorted(rows[name].unique()) != list(range(rows[name].n_unique())):
            yield f"{name} does not count from 0 without gaps"


def _everywhere(rows: polars.DataFrame, replicas: int) -> Iterator[str]:
    """Every operation is once in each step and replica, and these stand in one order: they compare row by row."""
    places: dict[Op, list[tuple[int, int]]] = defaultdict(list)
    for name, number, stage, step, dp_rank in rows.select(*_OP, "step", "dp_rank").iter_rows():
        places[Op(name, number, stage)].append((step, dp_rank))
    first = next(iter(places.values()))
    if len(set(first)) < rows["step"].n_unique() * replicas:
        yield "an operation is not in every step and replica"
    for op, own in places.items():
        if own != first:
            yield f"{op} is not where the others are"


def _complete(counts: Mapping[tuple[str, int], int], replicas: int, stages: int) -> Iterator[str]:
    """What their model knows is there, and nothing else."""
    parallel = replicas > 1
    separate = any(name == SEPARATE for name, _ in counts)
    for stage in range(stages):
        wanted = dict.fromkeys(AFTER, (1, 1)) | {FORWARD: (1, None), BACKWARD: (1, None)}
        wanted[EMBEDDING] = (1, 1) if stage in {0, stages - 1} else (0, 0)
        wanted |= dict.fromkeys(MESSAGES, (0, None if stages > 1 else 0))
        wanted |= {GATHER: (0, None if parallel else 0), SCATTER: (parallel, None if parallel else 0)}
        wanted[SEPARATE] = (separate, separate) if parallel else (0, 0)
        for name in {*wanted, *(name for name, own in counts if own == stage)}:
            count, (least, most) = counts.get((name, stage), 0), wanted.get(name, (0, 0))
            if count < least or (most is not None and count > most):
                yield f"stage {stage} has {count} of {name}"


class _Dependencies:
    """What needs what within a replica, and what ends together; `found`: where chunks and messages do not match."""

    def __init__(self, times: Times, chunks: Mapping[Op, int], replicas: int, stages: int) -> None:
        self.needs: dict[Op, list[Op]] = {op: [] for op in times}
        self.found: list[str] = []
        self._times, self._chunks, self._stages = times, chunks, stages
        self._n_chunks = 1 + max(chunks[op] for op in times if op.name == FORWARD)
        self._pairs: dict[tuple[object, ...], list[Op]] = defaultdict(list)
        for stage in range(stages):
            self._stage(stage, parallel=replicas > 1)
        self.groups = [tuple(sides) for sides in self._pairs.values()]
        for name in (EMBEDDING, CLIP):
            self.groups.append(tuple(op for op in times if op.name == name))
        self.found += [f"{pair} has not two sides" for pair in self._pairs.values() if len(pair) != 2]

    def _named(self, stage: int, *names: str) -> list[Op]:
        ops = [op for op in self._times if op.name in names and op.stage == stage]
        return sorted(ops, key=lambda op: (self._times[op][0], op.number, op.name))

    def _chain(self, ops: Sequence[Op]) -> None:
        for before, after in pairwise(ops):
            self.needs[after].append(before)

    def _stage(self, stage: int, *, parallel: bool) -> None:
        work = self._named(stage, FORWARD, BACKWARD)
        self._chain(work)
        turn = next(place for place, op in enumerate(work) if op.name == BACKWARD)
        if turn >= 2 and {op.name for op in work[turn - 2 : turn]} != {FORWARD}:
            self.found.append(f"stage {stage} has no two forwards before its first backward")
        for message in MESSAGES:
            self._messages(message, stage, work)
            if message.startswith("backward") and turn >= 2 and Op(message, 0, stage) in self.needs:
                self.needs[Op(message, 0, stage)].append(work[turn - 2])
        last = max(work, key=lambda op: self._times[op][1])
        garbage, layer_norm, embedding, *end = (self._named(stage, name) for name in AFTER)
        scatters, separate = self._named(stage, SCATTER), self._named(stage, SEPARATE)
        self._chain([last, *garbage, *layer_norm, *embedding, *(separate or scatters), *end[0], *end[1]])
        if parallel:
            self._chain(sorted([*self._named(stage, GATHER), *scatters], key=lambda op: self._times[op][0]))
        if separate:
            self._chain([last, scatters[0]])
            self._chain([scatters[-1], *layer_norm])
        for gather in self._named(stage, GATHER)[-1:]:
            self.needs[work[0]].append(gather)

    def _messages(self, message: str, stage: int, work: Sequence[Op]) -> None:
        """The n-th belongs to the n-th chunk of its kind; the n-th that has another side to the n-th there."""
        kind, receives, towards = f"{message.partition('-')[0]}-compute", message.endswith("recv"), MESSAGES[message]
        own = [op for op in work if op.name == kind]
        last_begin, first_end = max(self._times[op][0] for op in own), min(self._times[op][1] for op in own)
        ops = [
            op
            for op in self._named(stage, message)
            if (self._times[op][0] <= last_begin + CLOCKS if receives else self._times[op][1] >= first_end - CLOCKS)
        ]
        missing = len(own) - len(ops)
        if missing and (stage not in {0, self._stages - 1} or missing not in {1, len(own)}):
            self.found.append(f"stage {stage} has {len(ops)} of {message} for {len(own)} chunks")
            return
        self._chain(ops)
        sent = 0
        for place, op in enumerate(ops, start=int(receives and missing == 1)):
            chunk = Op(kind, place, stage)
            self.needs[chunk if receives else op].append(op if receives else chunk)
            if receives and place:
                self.needs[op].append(Op(kind, place - 1, stage))
            if 0 <= self._chunks[chunk] + towards < self._n_chunks:
                there = (stage + towards) % self._stages
                self._pairs[kind, *((there, stage) if receives else (stage, there)), sent].append(op)
                sent += 1

    def circle(self) -> list[str]:
        """Whether something waits for itself, groups taken as one."""
        one_of = {op: group[0] for group in self.groups for op in group}
        before: dict[Op, set[Op]] = defaultdict(set)
        for op, needs in self.needs.items():
            before[one_of.get(op, op)] |= {one_of.get(need, need) for need in needs}
        while ready := {op for op, needs in before.items() if not needs}:
            before = {op: needs - ready for op, needs in before.items() if op not in ready}  # type: ignore[assignment]
        return [f"a circle of {sorted(before)}"] if before else []

    def out_of_order(self, times: Times, tolerance: float) -> Iterator[str]:
        """Who begins before what it needs has ended, or ends before all of its group have begun."""
        for op, needs in self.needs.items():
            for need in needs:
                if times[op][0] < times[need][1] - tolerance:
                    yield f"{op} begins {times[need][1] - times[op][0]:.6f} s before {need} ends"
        for group in self.groups:
            begun = max((times[op][0] for op in group), default=0.0)
            for op in group:
                if times[op][1] < begun - tolerance:
                    yield f"{op} ends {begun - times[op][1]:.6f} s before all of {group} have begun"
