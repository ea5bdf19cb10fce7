"""Every rate, bandwidth, efficiency and cost that simulator, policies and studies use, each with its source.

Nothing is set per table, cell or study: a study that needs another value says so in its output.

>>> constant("hbm_gib_a100")
80.0
"""

from __future__ import annotations

import msgspec


class Constant(msgspec.Struct, frozen=True):
    """`value` in `unit`, and who says so ("ours" = a choice of ours, with its reason)."""

    value: float
    unit: str
    source: str


CONSTANTS: dict[str, Constant] = {
    # hardware
    "peak_flops_a100": Constant(312e12, "FLOP/s", "NVIDIA A100 data sheet, dense BF16"),
    "peak_flops_h100": Constant(989e12, "FLOP/s", "NVIDIA H100 SXM data sheet, dense BF16"),
    "hbm_gib_a100": Constant(80.0, "GiB", "NVIDIA A100 data sheet"),
    "kernel_efficiency": Constant(0.55, "of peak", "ours: Megatron-LM reports 44-57 % of A100 peak end to end"),
    "link_bytes_per_s": Constant(25e9, "B/s", "ResiHP section 8: 200 Gb/s HDR InfiniBand per GPU"),
    "gpus_per_node": Constant(8, "GPUs", "ResiHP section 8; FT-HSDP; Llama 3"),
    # tensor parallelism: how much longer a layer takes when half of the GPUs are left
    "tp_half_slowdown": Constant(1.90, "x", "Malleus planner, 70B profile: 1, 1.90, 3.66, 7.22 for tp, tp/2, tp/4, tp/8"),
    # memory
    "bytes_per_parameter": Constant(18.0, "B", "AdaPtis simulator: BF16 weight 2, FP32 gradient 4, master and moments 12"),
    "memory_share": Constant(0.9, "of HBM", "ours: allocator and communication buffers take the rest"),
    # end of an iteration
    "gradient_overlap": Constant(0.7, "of all-reduce", "ours: share hidden behind backward, DDP's usual range 0.5-0.9"),
    "optimizer_s": Constant(0.02, "s", "ours: 12 bytes/parameter of a 7B shard over 16 GPUs at 1.5 TB/s, rounded up"),
    "iteration_cv": Constant(0.015, "CV", "ByteDance artifact: op CV of one stage 1.5-3.1 % on healthy hardware, lower end"),
    # detection
    "heartbeat_s": Constant(3.0, "s", "ours: 1 s period, 3 misses; ResiHP says several consecutive misses"),
    "collective_timeout_s": Constant(600.0, "s", "torch.distributed default: 10 min"),
    "slow_detect_iterations": Constant(3.0, "iterations", "Greyhound: BOCD reacts in 2 to 3 iterations"),
    "slow_locate_s": Constant(6.86, "s", "Greyhound: profiling and validation, 256 H800"),
    "resihp_false_alarms_per_job": Constant(0.1, "alarms", "ResiHP table 5, Medium 16K; a job is taken for an hour"),
    "greyhound_false_alarms_per_job": Constant(5.2, "alarms", "ResiHP table 5, Medium 16K; a job is taken for an hour"),
    "resihp_false_alarm_s": Constant(0.045, "s", "ResiHP table 5"),
    "greyhound_false_alarm_s": Constant(3.28, "s", "ResiHP table 5"),
    "resihp_slow_recall": Constant(0.994, "share", "ResiHP: headline accuracy"),
    "greyhound_slow_recall": Constant(0.998, "share", "Greyhound: 498 of 499 jobs"),
    "speed_error": Constant(0.03, "relative", "ours: ResiHP's predictor errs 1.2-1.6 % per micro-batch; doubled for speeds"),
    # reconfiguration
    "regroup_s": Constant(1.94, "s", "ResiHP figure 13: 61.2 % of a 32B iteration of 3.17 s (64 GPUs)"),
    "planning_s": Constant(1.44, "s", "ResiHP figure 13: 45.4 % of a 32B iteration (64 GPUs)"),
    "layer_copy_bytes_per_s": Constant(12.5e9, "B/s", "ours: half of a 200 Gb/s link"),
    "oobleck_reconfigure_s": Constant(30.0, "s", "Bamboo artifact: global rendezvous 30 s; Oobleck's own figure is not public"),
    "topology_swap_s": Constant(60.0, "s", "Greyhound S3: about 1 min"),
    "restart_detect_s": Constant(60.0, "s", "FT-HSDP: detection is 60 s of a synchronous recovery"),
    "restart_s": Constant(540.0, "s", "FT-HSDP: the rest of the 10 min of a synchronous recovery; ByteRobust 454-768 s"),
    "checkpoint_interval_s": Constant(1800.0, "s", "ours: half an hour, between ByteRobust's every step and common hours"),
    "checkpoint_stall_s": Constant(0.45, "s", "ByteCheckpoint, 8,960 GPUs: write stall 0.3-0.6 s"),
    # FT-HSDP
    "ft_hsdp_mtbf_s": Constant(1080.0, "s", "FT-HSDP: one failure per 18 min at 98,304 GPUs"),
    "ft_hsdp_sync_down_s": Constant(600.0, "s", "FT-HSDP: synchronous recovery in the efficiency model"),
    "ft_hsdp_stall_s": Constant(180.0, "s", "FT-HSDP: all replicas stall 3 min per failure"),
    "ft_hsdp_target_stall_s": Constant(90.0, "s", "FT-HSDP: stall aimed at"),
    "ft_hsdp_rejoin_stall_s": Constant(110.0, "s", "FT-HSDP: 100-120 s when a replica rejoins (not in its 80 %)"),
    "ft_hsdp_step_s": Constant(20.0, "s", "FT-HSDP: step at 98,304 GPUs"),
    # ReCoVer
    "recover_shrink_s": Constant(1.0, "s", "ours: agree, shrink and recount on an MPI group; the paper gives no seconds"),
    # failure rates, per node-day of 8 GPUs
    "failures_per_node_day_rsc1": Constant(6.50e-3, "1/node-day", "Meta RSC-1"),
    "failures_per_node_day_llama3": Constant(3.79e-3, "1/node-day", "Llama 3: 419 in 54 days on 16,384 GPUs"),
    "failures_per_node_day_rsc2": Constant(2.34e-3, "1/node-day", "Meta RSC-2"),
    "failures_per_node_day_fthsdp": Constant(2.3e-3, "1/node-day", "FT-HSDP, 32K H100"),
    "lemon_factor": Constant(10.0, "x", "Meta lemon nodes, our reading: job failures 14 -> 4 % when they are removed"),
    "correlated_nodes": Constant(32, "nodes", "ByteRobust: 32 machines behind a switch"),
    "repair_median_s": Constant(3600.0, "s", "LANL 1996-2005: median outage 60 min"),
    "repair_sigma": Constant(1.3, "log", "ours: LANL repair times are log-normal and heavy-tailed"),
    "lognormal_sigma": Constant(1.0, "log", "ours: gaps 1.3 times as spread as exponential ones, beside Weibull's 1.5"),
    "weibull_shape": Constant(0.7, "", "Schroeder and Gibson 2006: decreasing hazard, shape 0.7-0.8"),
    # fail-slow
    "slow_median_s": Constant(1860.0, "s", "Greyhound: mean 72 min as log-normal of sigma 1.3 has median 31 min"),
    "slow_sigma": Constant(1.3, "log", "ours: matches Greyhound's mean and its maximum of about 10 h"),
    "slow_speed_low": Constant(0.4, "speed", "ours: Greyhound reports -20 % (heat) to -60 % and worse (congestion)"),
    "slow_speed_high": Constant(0.8, "speed", "Greyhound: a hot GPU runs 20 % slower"),
    "maintenance_s": Constant(1800.0, "s", "ours: host maintenance is 7.6 % of Llama 3's interruptions; half an hour"),
}


def constant(name: str) -> float:
    """The value of a constant. Raises `KeyError` for a name that is not in the table."""
    return CONSTANTS[name].value
