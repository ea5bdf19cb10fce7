"""What watching a DDP training of somebody else costs each rank: the same job with and without, in turns.

Two forked ranks on real CPU cores, which both go through all turns: what two processes differ by from start to start (70 us of
a step of a millisecond) is then in neither half. Without means that torch is as it was before `attach()`; the thread that beats
twice a second goes on meanwhile. By CPU time of the whole process (its threads that encode and write included, to the last line
of a half), in a job that computes next to nothing, so that the difference stands out; by the wall clock in one whose steps take
some 20 ms. And what `import unskew` and `attach()` cost a process that has imported torch. Beside it TraceML and NVRx in the
first job, where they are installed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from unskew.benchmarks.attach import cost_job
from unskew.benchmarks.attach.cost_job import LoopSize, Turn
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench

TURNS, WALL_TURNS = 40, 160
"""By the wall clock a half differs from the next by 5 %, so many are needed to see 1 %."""
MICRO_BATCHES = 4
BAR_US, BAR_PERCENT, WALL_PERCENT = 20.0, 0.3, 1.0
STARTS, START_MS = 7, 50.0
_START = """
import sys, time, torch, torch.distributed
before_s = time.process_time()
import unskew
unskew.attach(sys.argv[1], run="start")
print(time.process_time() - before_s)
"""
STEP_MS = 22.0
"""Of the step that the bars were set for."""
_RESAMPLES = 2_000
BASELINES = {
    "traceml": ("traceml_ai", "traceml-ai"),
    "nvrx": ("nvidia_resiliency_ext", "nvidia-resiliency-ext nvidia-cuda-cupti-cu12"),
}
"""Published tools: the module and what is installed for it."""
LIGHT, HEAVY = LoopSize(200, 1, 8, 4, 1), LoopSize(40, 4, 768, 48, 1)


def figures(bench: Bench, turns: int = TURNS, wall_turns: int = WALL_TURNS) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="unskew-overhead-") as folder:
        light_jobs = {each: LIGHT._replace(micro_batches=each) for each in (1, MICRO_BATCHES)}
        jobs = [*light_jobs.values(), HEAVY]
        found = {
            job: _pairs(Path(folder), "unskew", job, wall_turns if job is HEAVY else turns)
            for job in bench.steps("trainings of two ranks", jobs)
        }
        light, heavy = {each: found[job] for each, job in light_jobs.items()}, found[HEAVY]
        beside = [_of_another(Path(folder), tool, turns) for tool in bench.steps("the same by others", [*BASELINES])]
        starts_ms = [_start_ms(Path(folder)) for _ in bench.steps("starts", range(min(STARTS, turns)))]
    of_cpu = {each: [1e6 * (on[0] - off[0]) / each for on, off in pairs] for each, pairs in light.items()}
    of_step_us = median(of_cpu[1])
    wall = [100 * (on[1] - off[1]) / off[1] for on, off in heavy]
    low, high = interval(wall)
    step_ms = 1e3 * median(off[1] for _, off in heavy)
    halves = f"{turns} turns with and without, of {LIGHT.steps} steps; two ranks, real CPU cores, Gloo"
    return [
        figure("attach: CPU a micro-batch, a step of one", of_step_us, "us", bar=BAR_US, better="lower",
               note=f"{_between(of_cpu[1])}; {halves}"),
        figure(f"attach: CPU a micro-batch, a step of {MICRO_BATCHES}", median(of_cpu[MICRO_BATCHES]), "us", bar=BAR_US,
               better="lower", note=f"{_between(of_cpu[MICRO_BATCHES])}; {halves}"),
        figure(f"attach: CPU of a step of {STEP_MS:g} ms", of_step_us / 10 / STEP_MS, "%", bar=BAR_PERCENT, better="lower",
               note="the first, of that"),
        figure("attach: wall clock, upper end of the 95 % interval", high, "%", bar=WALL_PERCENT, better="lower",
               note=f"of a step of {step_ms:.1f} ms: median {median(wall):.2f} %, from {low:.2f} %; {wall_turns} turns"),
        figure("attach: CPU of import and attach, the most", max(starts_ms), "ms", bar=START_MS, better="lower",
               note=f"{len(starts_ms)} starts behind `import torch`, median {median(starts_ms):.1f} ms"),
        *beside,
    ]  # fmt: skip


def _of_another(folder: Path, tool: str, turns: int) -> Figure:
    """A step of one micro-batch, watched by a published tool."""
    what, (module, packages) = f"attach: CPU a micro-batch, a step of one, by {tool}", BASELINES[tool]
    if find_spec(module) is None:
        return figure(what, None, "us", better="lower", note=f"it is not installed: pip install {packages}")
    try:
        with _aggregator(folder) if tool == "traceml" else nullcontext():
            pairs = _pairs(folder, tool, LIGHT, turns)
    except subprocess.CalledProcessError as error:
        return figure(what, None, "us", better="lower", note=f"its job ended with {error.returncode}")
    of_cpu = [1e6 * (on[0] - off[0]) for on, off in pairs]
    waited_us = 1e6 * median(on[1] - off[1] for on, off in pairs)
    note = f"{_between(of_cpu)}; at least so much, as its threads go on in the other half; by the wall clock {waited_us:.0f} us"
    return figure(what, median(of_cpu), "us", better="lower", note=note)


@contextmanager
def _aggregator(folder: Path) -> Iterator[None]:
    """TraceML's, without which its ranks record nothing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ[cost_job.PORT] = port
    env = {"TRACEML_AGGREGATOR_PORT": port, "TRACEML_LOGS_DIR": str(folder), "TRACEML_SESSION_ID": cost_job.SESSION}
    env |= {"TRACEML_UI_MODE": "summary", "TRACEML_EXPECTED_WORLD_SIZE": "2"}
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "traceml_ai.aggregator.aggregator_main"]
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _start_ms(folder: Path) -> float:
    """CPU time of a fresh process, whose compiled modules are on the disk."""
    command = [sys.executable, "-c", _START, str(folder / "store")]
    return 1e3 * float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _pairs(folder: Path, tool: str, job: LoopSize, turns: int) -> list[tuple[Turn, Turn]]:
    """(with, without) per turn, the means of both ranks: they take each step together, so one says little beside the other."""
    out = folder / "-".join(map(str, (tool, *job)))
    out.mkdir()
    subprocess.run([sys.executable, cost_job.__file__, str(out), str(turns), tool, *map(str, job)], check=True)
    of_ranks = [msgspec.json.decode((out / f"{rank}.json").read_bytes(), type=list[tuple[Turn, Turn]]) for rank in range(2)]
    of_turns = np.mean(np.array(of_ranks), axis=0)  # by turn, half, figure
    return [((on[0], on[1]), (off[0], off[1])) for on, off in of_turns.tolist()]


def _between(values: Sequence[float]) -> str:
    low, high = interval(values)
    return f"95 % interval {low:.1f} to {high:.1f}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap."""
    chosen = np.random.default_rng(0).choice(np.array(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(chosen, axis=1), (0.025, 0.975))
    return float(low), float(high)
