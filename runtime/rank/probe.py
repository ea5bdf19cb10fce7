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
WARM_US = 10_000
"""For so long a device multiplies before it is timed: the first products of a process, and the first after a rest, take two to
four times as long as any later one, and with such a reference a slow device looked healthy ever after."""
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
    """The median time of the matrix product, each repetition recorded, of a device that is warm."""
    size = SIZE_ON_GPU if device.torch_device.type == "cuda" else SIZE
    matrix = torch.full((size, size), 0.5, device=device.torch_device)
    device.drain()

    def product() -> ChunkTiming:
        return device.run(ChunkOf("F", iteration, 1, False, _WORK, device.now_us()), lambda: matrix @ matrix)[1]()

    warm_us = 0 if device.emulated else WARM_US
    while warm_us > 0:
        warm_us -= max(product().wall_us, 1)
    times = []
    for _ in range(repeats if device.emulated else repeats * TIMES_AS_MANY):
        timing = product()
        recorder.add(
            recorder.span(
                kind="probe",
                start_us=timing.start_us,
                wall_us=timing.wall_us,
                compute_us=timing.compute_us,
                runq_us=timing.runq_us,
            )
        )
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
