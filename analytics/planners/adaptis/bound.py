"""A lower bound on the makespan of any plan of a task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unskew.analytics.pipeline.dag import Array
from unskew.analytics.planners.adaptis.task import AdaptisTask

MOST_INTEGERS = 256  # kinds of units x devices up to which the integer program is tried
MOST_NODES = 200  # of its search: a count, not a time, so that the bound does not depend on the machine's load


def lower_bound_us(task: AdaptisTask) -> float:
    """No partition, placement or order of the task ends earlier. The largest of

    * the path of one micro-batch: every F and B once and the first unit's W, on the fastest device;
    * work: the devices' capacity less what they lose before they can begin. Sorted by the first unit they hold, device j begins
      after the forwards of at least j units; the slowest devices may be those that begin last;
    * the busiest device: units are whole, so the best that any assignment of units to devices can do (a small integer program
      over kinds of units; its dual bound, which holds also when the solver stops early).
    """
    fastest = max(task.speeds)
    path = float(task.costs_us[:2].sum() + task.costs_us[2, 0]) / fastest
    begins = np.concatenate([[0.0], np.cumsum(task.costs_us[0])])[: len(task.speeds)] / fastest
    speeds = np.sort(task.speeds)[::-1]
    work = float(task.micro_batches * task.costs_us.sum() + (speeds * begins).sum()) / float(speeds.sum())
    alike = begins if len(set(task.speeds)) == 1 else np.zeros_like(begins)
    return max(path, work, busiest_device_us(task.costs_us.sum(axis=0) * task.micro_batches, task.speeds, alike))


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
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - 0.2 s that a diagnosis saves

    solved = milp(
        np.eye(1, kinds * devices + 1, kinds * devices)[0],
        integrality=np.array([1] * (kinds * devices) + [0]),
        bounds=Bounds(0.0, np.inf),
        constraints=[LinearConstraint(loads, -np.inf, -begins_us), LinearConstraint(shares, counts, counts)],
        options={"node_limit": MOST_NODES},
    )
    return 0.0 if solved.mip_dual_bound is None else float(solved.mip_dual_bound)
