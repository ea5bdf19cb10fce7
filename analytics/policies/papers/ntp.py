"""NTP (arXiv 2504.06095): a replica that lost GPUs runs with fewer of them per stage, any number, and a smaller batch."""

from __future__ import annotations

import msgspec

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import healthy
from unskew.analytics.cluster.timing import stage_speeds
from unskew.analytics.core.constants import constant
from unskew.analytics.core.layout import Layout, Pipeline
from unskew.analytics.core.sharing import proportional
from unskew.analytics.policies.base import ClusterView, Policy, Reaction, wait


class NtpPolicy(Policy):
    """Simplified: gradient resharding is hidden (the paper: at most 4 % of backward, NVIDIA states under 1 %); no power boost
    (NTP-PW); what moves is a group, not a domain of NVLink. As there a failure restarts the job, with the groups that lost
    devices packed into the fewest replicas.
    """

    name = "ntp"
    checkpoint_s = constant("checkpoint_interval_s")

    def delay_s(self, event: ClusterEvent, iteration_s: float) -> float:
        """It restarts as checkpoint-restart does, and notices as late."""
        return constant("restart_detect_s") if event.kind == "failed" else super().delay_s(event, iteration_s)

    def react(self, cluster: ClusterView, event: ClusterEvent) -> Reaction:
        job, dead = cluster.job, cluster.dead()
        whole, pipelines = healthy(job).pipelines, list[Pipeline]()
        living = (tuple(device for device in group if device not in dead) for one in whole for group in one.groups)
        hurt_first = sorted(living, key=len)
        for number, pipeline in enumerate(whole):
            groups = hurt_first[number * job.pp : (number + 1) * job.pp]
            least = min(len(group) for group in groups)
            if least >= job.least_tp:
                pipelines.append(Pipeline(pipeline.replica, tuple(group[:least] for group in groups), pipeline.layers, 1))
        if not pipelines:
            return wait("no replica holds the model")
        speeds = stage_speeds(job, Layout(tuple(pipelines)), cluster.speeds)
        counts = proportional(job.micro_batches, [min(stages) for stages in speeds])
        dealt = (
            msgspec.structs.replace(one, micro_batches=count) for one, count in zip(pipelines, counts, strict=True) if count
        )
        layout = Layout(tuple(dealt), schedule=job.schedule)
        if layout == cluster.layout:
            return Reaction(layout=layout)
        return Reaction(
            layout=layout, pauses=(("restart", constant("restart_s")),), redo="checkpoint",
            reason=f"TP degrees {', '.join(str(len(p.groups[0])) for p in layout.pipelines)}",
        )  # fmt: skip
