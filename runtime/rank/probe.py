"""A probe on a rank: a matrix product by the device's own clock, and transfers between the ranks that are probed."""

from __future__ import annotations

from statistics import median

import torch

from unskew.analytics.core.workload import Work
from unskew.analytics.health.probing import Probe, passes
from unskew.runtime.nvml import gpu_state
from unskew.runtime.rank.comm import Comm
from unskew.runtime.rank.device import ChunkOf, ChunkTiming, Device
from unskew.runtime.rank.recorder import Recorder

SIZE, SIZE_ON_GPU = 256, 4096
"""Of the matrices: on a GPU a small product would measure how fast it is launched."""
WARM_US, MOST_US = 10_000, 1_000_000
"""For so long a device computes products before it is timed: the first ones of a process, and after a rest, took 1.5 to 4 times
as long on a CPU core as any later one, and against such a reference a slow device looked healthy ever after. Where one product
takes long no more are made than must be, after a second."""
TIMES_AS_MANY = 3
"""Of products that take what the device takes, against those that take what a profile says."""
_WORK = Work(256, 256 * 256)
"""What an emulated device takes the product for: a forward pass of one layer over 256 tokens."""
_TAG = 1 << 20


def run_probe(probe: Probe, rank: int, iteration: int, *, device: Device, comm: Comm, recorder: Recorder) -> None:
    """This rank's part. Raises `PeerLost`."""
    if rank not in probe.ranks:
        return
    product_us(probe.repeats, iteration, device, recorder)
    if device.torch_device.type == "cuda" and (state := gpu_state(rank, device.torch_device.index, iteration)):
        recorder.add(state)
    if not device.carries_time:  # a logical clock does not know what a transfer takes
        _transfers(probe, rank, device, comm, recorder)


def product_us(repeats: int, iteration: int, device: Device, recorder: Recorder) -> int:
    """The median time of the matrix product of a device that is warm. Each repetition is recorded, and as one span without a
    time of its own what came before."""
    size = SIZE_ON_GPU if device.torch_device.type == "cuda" else SIZE
    matrix = torch.full((size, size), 0.5, device=device.torch_device)
    device.drain()

    def product() -> ChunkTiming:
        return device.run(ChunkOf("F", iteration, 1, False, _WORK, device.now_us()), lambda: matrix @ matrix)[1]()

    def record(start_us: int, wall_us: int, compute_us: int | None = None, runq_us: int | None = None) -> None:
        recorder.add(recorder.span(kind="probe", start_us=start_us, wall_us=wall_us, compute_us=compute_us, runq_us=runq_us))

    began_us, warm_us = device.now_us(), 0
    while not device.emulated and warm_us < WARM_US and device.now_us() - began_us < MOST_US:
        timing = product()
        warm_us += timing.compute_us if timing.cpu_us is None else timing.cpu_us
    if not device.emulated:
        record(began_us, device.now_us() - began_us)
    times: list[int] = []
    most = repeats if device.emulated else repeats * TIMES_AS_MANY
    while len(times) < repeats or (len(times) < most and device.now_us() - began_us < MOST_US):
        timing = product()
        record(timing.start_us, timing.wall_us, timing.compute_us, timing.runq_us)
        times.append(timing.compute_us)
    return int(median(times))


def _transfers(probe: Probe, rank: int, device: Device, comm: Comm, recorder: Recorder) -> None:
    for number, pairs in enumerate(passes(probe.ranks)):
        for sender, receiver in pairs:
            if rank not in (sender, receiver):
                continue
            for size in probe.message_bytes:
                buffer = torch.zeros(size, dtype=torch.uint8)  # on the host, as all that Gloo carries
                # One byte in the other direction first: the transfer begins when both sides are there.
                here = torch.zeros(1, dtype=torch.uint8)
                if rank == sender:
                    comm.receive(here, receiver, _TAG + number).wait()
                    comm.send(buffer, receiver, _TAG + number).wait()
                    continue
                comm.send(here, sender, _TAG + number).wait()
                start_us = device.now_us()
                comm.receive(buffer, sender, _TAG + number).wait()
                wall_us = device.now_us() - start_us
                recorder.add(recorder.span(kind="probe", start_us=start_us, wall_us=wall_us, peer=sender, bytes=size))
