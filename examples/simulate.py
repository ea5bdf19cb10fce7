"""Days of a large job under several policies, the same devices dying and slowing down under each.

`python examples/simulate.py [HOURS]`
"""

from __future__ import annotations

import sys

from unskew.analytics.lab.simulator.arrivals import arrivals
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.lab.simulator.specs import parse_cluster, parse_faults
from unskew.analytics.policies.registry import policy


def main(hours: float) -> None:
    job = parse_cluster("llama2-70b")
    faults = arrivals(job, parse_faults("mtbf_s=14400,repair_s=3600,slow_per_100_hours=8"), hours=hours, seed=1)
    print(f"{job.name}: {job.devices:,} devices, {len(faults)} cluster events in {hours:g} hours")
    for name in ("checkpoint-restart", "ft-hsdp", "resihp", "unskew"):
        outcome = simulate(job, policy(name), faults, SimulationOptions(hours=hours, seed=1))
        print(f"{name:20} effective training time {100 * outcome.effective:.1f} %")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 96.0)
