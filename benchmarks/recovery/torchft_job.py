"""A job under torchft on this machine: replicas of one process each, one of them killed every so many steps and started again.

    python -m unskew.benchmarks.recovery.torchft_job '{"out": "DIR", "replicas": 4, "steps": 100, "every": 20, "step_s": 0.36}'

A step sleeps for its time, as on our sleeping device, then reduces real gradients through torchft's Manager over Gloo. Each
replica writes a line per attempt (`Attempt`) to FOLDER, the supervisor one per kill (`ReplicaKill`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec

_POLL_S = 0.02
_PATIENCE = timedelta(seconds=20)
_TICK_MS, _HEARTBEAT_MS = 100, 1_000
"""Of the Lighthouse: the first as in torchft's README; a heartbeat is missed after 5 s by default, which is longer only."""


class TorchftJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; `lighthouse` and `replica` are the supervisor's word to a replica."""

    out: str
    replicas: int = 4
    steps: int = 100
    every: int = 20
    step_s: float = 0.36
    join_timeout_ms: int = 10_000
    lighthouse: str = ""
    replica: int = -1


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's try at `step`; `replicas` took part with a batch."""

    replica: int
    step: int
    began_s: float
    ended_s: float
    committed: bool
    replicas: int


class ReplicaKill(msgspec.Struct, frozen=True, kw_only=True):
    replica: int
    at_s: float


def attempts(out: Path) -> list[Attempt]:
    """All that replicas have written so far, each replica's in their order."""
    lines = (line for path in sorted(out.glob("replica-*")) for line in path.read_bytes().splitlines(keepends=True))
    return [msgspec.json.decode(line, type=Attempt) for line in lines if line.endswith(b"\n")]


def kills(out: Path) -> list[ReplicaKill]:
    """The supervisor's."""
    return [msgspec.json.decode(line, type=ReplicaKill) for line in (out / "kills").read_bytes().splitlines()]


def replicate(job: TorchftJob) -> None:
    """One replica, until all steps are committed."""
    import torch  # noqa: PLC0415 - the bench itself starts without them
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    inner = torch.optim.AdamW(model.parameters())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=job.lighthouse,
        replica_id=f"replica_{job.replica}",
        hostname="127.0.0.1",
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        init_sync=False,
    )
    with (Path(job.out) / f"replica-{job.replica}").open("ab", buffering=0) as log:
        while manager.current_step() < job.steps:
            began_s = time.time()
            manager.start_quorum()
            inner.zero_grad()
            time.sleep(job.step_s)
            model(torch.randn(8, 64)).square().mean().backward()
            for work in [manager.allreduce(one.grad) for one in model.parameters() if one.grad is not None]:
                work.wait()
            step, members = manager.current_step(), manager.num_participants()
            committed = manager.should_commit()
            if committed:
                inner.step()
            line = Attempt(
                replica=job.replica, step=step, began_s=began_s, ended_s=time.time(), committed=committed, replicas=members
            )
            log.write(msgspec.json.encode(line) + b"\n")
    os._exit(0)  # threads of its servers would wait for each other


def supervise(job: TorchftJob) -> None:
    """Start all, kill one every so many steps once all take part, start it again; until all are through."""
    from torchft._torchft import LighthouseServer  # noqa: PLC0415 - as above

    out = Path(job.out)
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=job.join_timeout_ms, quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=_HEARTBEAT_MS,
    )  # fmt: skip
    processes = {number: _start(job, lighthouse.address(), number) for number in range(job.replicas)}
    due = victim = 0
    with (out / "kills").open("ab", buffering=0) as log:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(_POLL_S)
            seen = attempts(out)
            newest = max((one.step for one in seen if one.committed), default=0)
            if not due and any(one.replicas == job.replicas for one in seen):
                due = newest + job.every // 2
            if due and newest >= due and due <= job.steps - job.every // 2:
                processes[victim].send_signal(signal.SIGKILL)
                log.write(msgspec.json.encode(ReplicaKill(replica=victim, at_s=time.time())) + b"\n")
                processes[victim].wait()
                processes[victim] = _start(job, lighthouse.address(), victim)
                due, victim = due + job.every, (victim + 1) % job.replicas
    lighthouse.shutdown()


def _start(job: TorchftJob, lighthouse: str, replica: int) -> subprocess.Popen[bytes]:
    asked = msgspec.structs.replace(job, lighthouse=lighthouse, replica=replica)
    with (Path(job.out) / "log").open("ab") as log:
        command = [sys.executable, "-m", "unskew.benchmarks.recovery.torchft_job", msgspec.json.encode(asked).decode()]
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    asked_for = msgspec.json.decode(sys.argv[1], type=TorchftJob)
    (supervise if asked_for.replica < 0 else replicate)(asked_for)
