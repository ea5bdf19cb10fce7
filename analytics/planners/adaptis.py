"""Partition, placement and schedule of one pipeline tuned together by the bubble-aware rule (AdaPtis/OctoPipe, arXiv
2509.23722).

The paper's text could not be read; the rule is the one restated from its Algorithm 1, the moves are ours where no source gives
them. Steps of `tune`:

1. baselines: 1F1B, interleaved 1F1B (2 ranges per device) and ZB-H1 on the usual partition (equal counts of
blocks, embedding and
   head with the first and last); the most activations that one of them keeps on a device is the limit, unless
   one is given;
2. starts: 1 to 4 ranges per device, in a loop or there and back, with the loads of the devices balanced (layouts.py), each
   scheduled by `dispatch`; the best few are tuned;
3. each round looks at the timeline: with d = largest less smallest idle time of a device,

       d > the smallest unit's time in the iteration   -> partition: units over the boundaries of stages
       else sum of boundary idle > sum of gaps         -> placement: stages to other devices, split, joined
       else                                            -> schedule: the knobs of `dispatch`

   takes the first improving move of that kind that it meets in random order (seeded), tries the other kinds when there is
   none, and when nothing improves goes on from the best so far with two random moves, until the evaluations are used up;
4. the answer is the best of tuned and baselines, as orders (split backward) that the runtime can execute (`Found.plan`); its
   time is the evaluator's, not the search's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import msgspec
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from unskew.analytics.bubbles import bubbles
from unskew.analytics.chunks import Array
from unskew.analytics.memory import peak_activations
from unskew.analytics.notation import with_orders
from unskew.analytics.pipeline import evaluate, per_hop, pipeline_of
from unskew.analytics.plan import Plan, PlanError, plan_from_partition, way_of
from unskew.analytics.planners.dispatch import Dispatched, Knobs, Pipeline, Step, dispatch
from unskew.analytics.planners.layouts import Layout, moved_stages, shifted_boundaries, start_layouts, usual
from unskew.analytics.schedule import Kind, action_of, build_schedule, splits_backward

BASELINES = ("1f1b", "interleaved", "zb-h1")
"""What the answer is never worse than, and whose activations it may keep."""


MOST_INTEGERS = 256  # kinds of units x devices up to which the bound's integer program is tried
MOST_TRIED = 40  # moves of one kind tried per round: with many stages there are a thousand


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """`costs_us` [kind F B W, unit] on a healthy device, `speeds` per device, `kept` activations per unit (bytes, or any unit);
    `limit`: most activations a device may keep (None = as the baselines)."""

    costs_us: Array
    speeds: tuple[float, ...]
    micro_batches: int
    kept: Array
    message_us: float = 0.0
    limit: float | None = None

    @property
    def n_units(self) -> int:
        return int(self.costs_us.shape[1])


class Round(msgspec.Struct, frozen=True):
    """One step of the search: what the rule asked for, what was moved, and the makespan after it."""

    rule: str
    move: str
    makespan_us: float


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `baselines_us`: schedule -> makespan (those that fit the task). `bound_us`: no plan of the task is faster."""

    name: str
    layout: Layout
    lists: tuple[tuple[Step, ...], ...]
    makespan_us: float
    kept_peak: float
    baselines_us: dict[str, float]
    bound_us: float
    trail: tuple[Round, ...]
    evaluations: int

    def plan(self, *, replicas: int = 1, epoch: int = 0) -> Plan:
        """The answer for equal replicas: device i of replica d is rank ``d * devices + i``, units are the plan's layers."""
        devices = 1 + max(self.layout.device)
        count = sum(kind == "F" and stage == 0 for steps in self.lists for kind, stage, _ in steps)
        plan = plan_from_partition(
            epoch=epoch,
            n_layers=sum(self.layout.sizes),
            schedule="searched",
            members=[[d * devices + device for device in self.layout.device] for d in range(replicas)],
            layers=[self.layout.sizes] * replicas,
            micro_batches=[count] * replicas,
        )
        routes = [[route for route in plan.routes if route.replica == d] for d in range(replicas)]
        return with_orders(
            plan,
            {
                d * devices + device: [action_of(routes[d][m], kind, stage) for kind, stage, m in steps]
                for d in range(replicas)
                for device, steps in enumerate(self.lists)
                if steps
            },
        )


def tune(task: Task, *, evaluations: int = 600, starts: int = 3) -> Found:
    """The best pipeline found with at most about `evaluations` dispatches. Raises `PlanError` when there are fewer units than
    devices, or when no order stays within the task's limit."""
    if task.n_units < len(task.speeds):
        raise PlanError(f"{task.n_units} units cannot fill {len(task.speeds)} devices: at least one unit per device is needed")
    baselines = {name: found for name in BASELINES if (found := _baseline(task, name)) is not None}
    limit = max(found.kept_peak for found in baselines.values()) if task.limit is None else task.limit
    search = _Search(task, limit)
    seeds = sorted(
        (search.seed(layout) for layout in start_layouts(task.costs_us.sum(axis=0), task.speeds)), key=lambda s: s.us
    )
    best = seeds[0]
    for number, seed in enumerate(seeds[:starts]):
        tuned = search.climb(seed, evaluations * (number + 1) // starts)
        best = min(best, tuned, key=lambda state: state.us)
    answers = [_answer(task, name, found.layout, found.lists) for name, found in baselines.items() if found.kept_peak <= limit]
    if best.us < inf:
        answers.append(_answer(task, "tuned", best.layout, best.found.lists, best.trail))
    if not answers:
        raise PlanError(f"no order keeps the activations of a device within {limit:g}")
    answer = min(answers, key=lambda found: found.makespan_us)
    return msgspec.structs.replace(
        answer,
        baselines_us={name: found.makespan_us for name, found in baselines.items()},
        bound_us=lower_bound_us(task),
        evaluations=search.used,
    )


def lower_bound_us(task: Task) -> float:
    """No partition, placement or order of the task ends earlier. The largest of

    * the way of one micro-batch: every F and B once and the first unit's W, on the fastest device;
    * work: the devices' capacity less what they lose before they can begin. Sorted by the first unit they hold, device j begins
      after the forwards of at least j units; the slowest devices may be those that begin last;
    * the busiest device: units are whole, so the best that any assignment of units to devices can do (a small integer program
      over kinds of units; its dual bound, which holds also when the solver runs out of time).
    """
    fastest = max(task.speeds)
    way = float(task.costs_us[:2].sum() + task.costs_us[2, 0]) / fastest
    begins = np.concatenate([[0.0], np.cumsum(task.costs_us[0])])[: len(task.speeds)] / fastest
    speeds = np.sort(task.speeds)[::-1]
    work = float(task.micro_batches * task.costs_us.sum() + (speeds * begins).sum()) / float(speeds.sum())
    alike = begins if len(set(task.speeds)) == 1 else np.zeros_like(begins)
    return max(way, work, busiest_device_us(task.costs_us.sum(axis=0) * task.micro_batches, task.speeds, alike))


def busiest_device_us(units_us: Array, speeds: Sequence[float], begins_us: Array) -> float:
    """A lower bound on the end of the last device when device d begins at `begins_us[d]` and whole units are shared out.

    Integer program: n[kind, d] units of each kind on device d; minimise T with begins[d] + sum of n x time / speed[d] <= T.
    """
    times, counts = np.unique(units_us.round(6), return_counts=True)
    kinds, devices = len(times), len(speeds)
    if kinds * devices > MOST_INTEGERS:
        return 0.0
    loads = np.zeros((devices, kinds * devices + 1))
    for device, speed in enumerate(speeds):
        loads[device, device * kinds : (device + 1) * kinds] = times / speed
    loads[:, -1] = -1.0
    shares = np.hstack([np.tile(np.eye(kinds), devices), np.zeros((kinds, 1))])
    solved = milp(
        np.eye(1, kinds * devices + 1, kinds * devices)[0],
        integrality=np.array([1] * (kinds * devices) + [0]),
        bounds=Bounds(0.0, np.inf),
        constraints=[LinearConstraint(loads, -np.inf, -begins_us), LinearConstraint(shares, counts, counts)],
        options={"time_limit": 1.0},
    )
    return 0.0 if solved.mip_dual_bound is None else float(solved.mip_dual_bound)


def _baseline(task: Task, name: str) -> Found | None:
    """A schedule on the usual partition; None when the units or the micro-batches do not allow it."""
    devices = len(task.speeds)
    way = tuple(way_of(name, range(devices)))
    if task.n_units < len(way) or (name == "interleaved" and task.micro_batches % devices):
        return None
    layout = Layout(usual(task.n_units, len(way)), way)
    chunks = pipeline_of(name, ranks=devices, micro_batches=task.micro_batches)
    stages = _stage_costs(task, layout)
    whole = stages if splits_backward(name) else np.stack([stages[0], stages[1] + stages[2]])
    makespan = float(chunks.makespan_us(per_hop(chunks, whole), task.message_us))
    kinds: tuple[Kind, ...] = ("F", "B", "W")
    lists = []
    for _, positions in chunks.rank_positions():
        steps: list[Step] = []
        for position in positions.tolist():
            kind, hop, number = kinds[chunks.kind[position]], int(chunks.hop[position]), int(chunks.micro_batch[position])
            steps.append((kind, hop, number))
            if kind == "B" and not splits_backward(name):
                steps.append(("W", hop, number))
        lists.append(tuple(steps))
    return msgspec.structs.replace(
        _untimed(name, layout, tuple(lists)),
        makespan_us=makespan,
        kept_peak=max(peak_activations(chunks, _stage_kept(task, layout)).values()),
    )


def _answer(task: Task, name: str, layout: Layout, lists: tuple[tuple[Step, ...], ...], trail: tuple[Round, ...] = ()) -> Found:
    """The orders as an answer, timed by the evaluator."""
    blank = _untimed(name, layout, lists, trail)
    schedule = build_schedule(blank.plan())
    durations = per_hop(schedule.chunks, _stage_costs(task, layout))
    return msgspec.structs.replace(
        blank,
        makespan_us=float(evaluate(schedule, durations, task.message_us).makespan_us),
        kept_peak=max(peak_activations(schedule.chunks, _stage_kept(task, layout)).values()),
    )


def _untimed(name: str, layout: Layout, lists: tuple[tuple[Step, ...], ...], trail: tuple[Round, ...] = ()) -> Found:
    return Found(
        name=name,
        layout=layout,
        lists=lists,
        makespan_us=inf,
        kept_peak=inf,
        baselines_us={},
        bound_us=0.0,
        trail=trail,
        evaluations=0,
    )


def _stage_kept(task: Task, layout: Layout) -> Array:
    """Activations of one micro-batch: [stage]."""
    return np.array([task.kept[first:end].sum() for first, end in layout.spans])


def _stage_costs(task: Task, layout: Layout) -> Array:
    """Microseconds at the devices' speeds: [kind, stage]."""
    sums = np.add.reduceat(task.costs_us, [first for first, _ in layout.spans], axis=1)
    return np.asarray(sums / np.array([task.speeds[device] for device in layout.device]))


class _State(msgspec.Struct, frozen=True):
    layout: Layout
    knobs: Knobs
    found: Dispatched
    trail: tuple[Round, ...] = ()

    @property
    def us(self) -> float:
        return self.found.makespan_us


class _Search:
    """Dispatches layouts, remembers what it has seen, and counts."""

    def __init__(self, task: Task, limit: float) -> None:
        self.task, self.limit, self.used = task, limit, 0
        self.seen: dict[tuple[Layout, Knobs], Dispatched] = {}
        self.random = np.random.default_rng(0)
        self._moves = {"partition": self._partitions, "placement": self._placements, "schedule": self._schedules}

    def seed(self, layout: Layout) -> _State:
        """The layout under the better of two sets of knobs."""
        states = [self._state(layout, Knobs(self.limit, turn=turn)) for turn in ("latest", "groups")]
        return min(states, key=lambda state: state.us)

    def climb(self, state: _State, until: int) -> _State:
        """Step 3 of the module's list, until `until` dispatches have been used in all."""
        best = state
        while self.used < until and state.us < inf:
            rule = self._rule(state)
            for kind in (rule, *(other for other in self._moves if other != rule)):
                found = self._improved(state, kind, until)
                if found is not None:
                    move, better = found
                    trail = (*state.trail, Round(rule, f"{kind}: {move}", better.us))
                    state = msgspec.structs.replace(better, trail=trail)
                    break
            else:
                best = min(best, state, key=lambda tried: tried.us)
                state = self._kicked(best)
        return min(best, state, key=lambda tried: tried.us)

    def _improved(self, state: _State, kind: str, until: int) -> tuple[str, _State] | None:
        """The first of some moves of a kind that ends earlier than `state`."""
        moves = list(self._moves[kind](state))
        for number in self.random.permutation(len(moves))[:MOST_TRIED].tolist():
            if self.used >= until:
                return None
            name, layout, knobs = moves[number]
            tried = self._state(layout, knobs)
            if tried.us < state.us * (1 - 1e-9):
                return name, tried
        return None

    def _kicked(self, state: _State) -> _State:
        """Two random moves on; the state itself when they lead nowhere."""
        moved = state
        for _ in range(2):
            kind = str(self.random.choice(list(self._moves)))
            moves = list(self._moves[kind](moved))
            if moves:
                name, layout, knobs = moves[int(self.random.integers(len(moves)))]
                tried = self._state(layout, knobs)
                if tried.us < inf:
                    trail = (*moved.trail, Round("try elsewhere", f"{kind}: {name}", tried.us))
                    moved = msgspec.structs.replace(tried, trail=trail)
        self.used += moved is state
        return moved

    def _state(self, layout: Layout, knobs: Knobs) -> _State:
        key = (layout, knobs)
        if key not in self.seen:
            self.used += 1
            stages = _stage_costs(self.task, layout)
            pipe = Pipeline(
                f_us=stages[0].tolist(),
                b_us=stages[1].tolist(),
                w_us=stages[2].tolist(),
                kept=_stage_kept(self.task, layout).tolist(),
                device=layout.device,
                n_devices=len(self.task.speeds),
                micro_batches=self.task.micro_batches,
                message_us=self.task.message_us,
            )
            self.seen[key] = dispatch(pipe, knobs)
        return _State(layout, knobs, self.seen[key])

    def _rule(self, state: _State) -> str:
        idle, boundary, residual = self._bubbles(state)
        smallest = self.task.micro_batches * float(self.task.costs_us.sum(axis=0).min())
        if idle.max() - idle.min() > smallest:
            return "partition"
        return "placement" if boundary.sum() > residual.sum() else "schedule"

    def _bubbles(self, state: _State) -> tuple[Array, Array, Array]:
        """Idle, boundary and residual time per device; a device without a stage is idle throughout."""
        schedule = build_schedule(_untimed("", state.layout, state.found.lists).plan())
        durations = per_hop(schedule.chunks, _stage_costs(self.task, state.layout))
        timeline = evaluate(schedule, durations, self.task.message_us)
        classed = bubbles(schedule.chunks, timeline.start_us, timeline.end_us)
        idle = np.full(len(self.task.speeds), state.us)
        boundary, residual = idle.copy(), np.zeros_like(idle)
        ranks = list(classed.ranks)
        idle[ranks], boundary[ranks], residual[ranks] = classed.idle_us, classed.boundary_us, classed.residual_us
        return idle, boundary, residual

    def _loads(self, layout: Layout) -> Array:
        loads = np.zeros(len(self.task.speeds))
        np.add.at(loads, list(layout.device), _stage_costs(self.task, layout).sum(axis=0))
        return loads

    def _worth(self, state: _State, layouts: Iterator[tuple[str, Layout]]) -> Iterator[tuple[str, Layout, Knobs]]:
        """Those whose busiest device alone does not need much longer than the present plan."""
        for name, layout in layouts:
            if self._loads(layout).max() * self.task.micro_batches < 1.05 * state.us:
                yield name, layout, state.knobs

    def _partitions(self, state: _State) -> Iterator[tuple[str, Layout, Knobs]]:
        return self._worth(state, shifted_boundaries(state.layout))

    def _placements(self, state: _State) -> Iterator[tuple[str, Layout, Knobs]]:
        loads = self._loads(state.layout)
        return self._worth(state, moved_stages(state.layout, int(loads.argmax()), int(loads.argmin())))

    def _schedules(self, state: _State) -> Iterator[tuple[str, Layout, Knobs]]:
        def knobs(**changes: object) -> tuple[str, Layout, Knobs]:
            changed = msgspec.structs.replace(state.knobs, **changes)
            return ", ".join(f"{name} {value}" for name, value in changes.items()), state.layout, changed

        for patience in (0.0, 0.25, 0.5, 1.0, 2.0):
            yield knobs(patience=patience)
        for turn in ("latest", "groups", "lowest"):
            for forward_first in (False, True):
                yield knobs(turn=turn, forward_first=forward_first)
        for share in (1.0, 0.9, 0.75):
            yield knobs(limit=share * self.limit)


def gains(found: Found) -> dict[str, float]:
    """How many times faster the answer is than each baseline, and "bound": its time over the lower bound."""
    over = {name: us / found.makespan_us for name, us in found.baselines_us.items()}
    return {**over, "bound": found.makespan_us / found.bound_us}


def speeds_of(count: int, slow: Sequence[tuple[int, float]] = ()) -> tuple[float, ...]:
    """Healthy devices but for these (device, speed)."""
    return tuple(dict(slow).get(device, 1.0) for device in range(count))
