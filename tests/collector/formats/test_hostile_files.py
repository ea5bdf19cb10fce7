"""Whatever is in a file, an import of it ends with an exit code and a sentence: 300 files, seeded, each format's own bent."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import polars
import pytest
from support.traces.trace_records import ENTRY, OPERATION, TITAN
from typer.testing import CliRunner

from unskew.cli import app
from unskew.collector.formats.registry import IMPORTERS

FILES = 300
MOST_BYTES = 1_000_000_000
NUMBERS = [
    "-1",
    "0",
    "1e308",
    "-1e308",
    "NaN",
    "Infinity",
    str(2**63),
    str(2**70),
    "0.5",
    '"x"',
    "null",
    "[]",
    "{}",
    "true",
    "1e-320",
]
TEXTS = ["", "\x1b[31m", "\x00", "x" * 100_000, "../../out", "\ud800", "[/x]", "ProfilerStep#-1", "nccl:", "🦆", "9" * 5_000]
STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 10.0, "dur": 9.0, "pid": 1, "tid": 1}
PASS = {"ph": "X", "cat": "cpu_op", "name": "gloo:all_reduce", "ts": 11.0, "dur": 2.0, "pid": 1, "tid": 1, "args": {"x": 1}}


def lines(text: str) -> bytes:
    return "".join(text % (at, at) for at in range(1, 9)).encode()


def whole(folder: Path) -> dict[str, tuple[str, bytes]]:
    """A good file of each format: its name and its bytes."""
    polars.DataFrame(OPERATION).write_parquet(folder / "whole.parquet")
    kineto = {"traceEvents": [STEP, PASS, STEP | {"name": "ProfilerStep#5", "ts": 20.0}], "distributedInfo": {"rank": 0}}
    files = {
        "straggler-analysis": ("t.parquet", (folder / "whole.parquet").read_bytes()),
        "kineto": ("rank-0.json", json.dumps(kineto).encode()),
        "torchtitan": ("a.jsonl", "".join(json.dumps(TITAN | {"step": at}) + "\n" for at in range(1, 9)).encode()),
        "iteration-times": ("t.csv", b"step,seconds,rank\n" + lines("%d,0.%d,0\n")),
        "megatron": ("a.log", lines(" iteration %d/ 500 | consumed samples: 16 | elapsed time per iteration (ms): %d.0 |\n")),
        "mlperf": (
            "a.log",
            lines(':::MLLOG {"time_ms": %d, "key": "train_step_time", "value": 0.5, "metadata": {"step": %d}}\n'),
        ),
        "flight-recorder": ("a_1", pickle.dumps({"entries": [ENTRY]})),
    }
    (folder / "whole.parquet").unlink()
    return files


def flipped(data: bytes, draw: random.Random) -> bytes:
    bent = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        bent[draw.randrange(len(bent))] = draw.randrange(256)
    return bytes(bent)


def with_number(data: bytes, draw: random.Random) -> bytes:
    """A number of the file is another, or no number."""
    text = data.decode(errors="surrogateescape")
    places = [at for at, sign in enumerate(text) if sign.isdigit()]
    at = draw.choice(places)
    return (text[:at] + draw.choice(NUMBERS) + text[at + 1 :]).encode(errors="surrogateescape")


def with_text(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + draw.choice(TEXTS).encode(errors="surrogatepass") + data[at + draw.randint(0, 3) :]


def bomb(data: bytes, draw: random.Random) -> bytes:
    return gzip.compress(data) + gzip.compress(b" " * 10**6) * draw.choice([0, 1, 300])


BENT: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped": flipped,
    "cut": lambda data, draw: data[: draw.randrange(len(data))],
    "with_number": with_number,
    "with_text": with_text,
    "repeated": lambda data, draw: data * draw.choice([2, 50]),
    "nested": lambda data, draw: data[: draw.randrange(len(data))] + b"[" * 200_000,
    "turned_round": lambda data, _: data[::-1],
    "utf-16": lambda data, _: data.decode("latin-1").encode("utf-16"),
    "noise": lambda _, draw: draw.randbytes(draw.choice([1, 11, 4096])),
    "bomb": bomb,
    "no_end_of_line": lambda data, _: data.replace(b"\n", b"") + b"9" * 10_000_000,
    "pickled": lambda _, draw: draw.choice(
        [b"\x80\x04\x8e\xff\xff\xff\xff\x00\x00\x00\x00.", b"cos\nsystem\n(S'id'\ntR.", b"(" * 9_999]
    ),
}


def placed(folder: Path, name: str, data: bytes, draw: random.Random) -> Path:
    """Most are plain files; a few are what only has a file's name, or a name that is no text."""
    path = folder / draw.choice([name] * 12 + [name + ".gz", "\x1b[31m" + name, "a\n" + name, "rank-99999999999" + name])
    kind = draw.randrange(24)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.mkdir()
        (path / name).write_bytes(data)
        (path / "again").symlink_to(path)
    else:
        path.write_bytes(data)
    return path


def listing(folder: Path) -> list[tuple[str, int, int]]:
    """Every name under the folder, its size and when it was written."""
    found = [Path(at) / name for at, folders, files in os.walk(folder) for name in (*folders, *files)]
    return sorted((str(one), one.lstat().st_size, one.lstat().st_mtime_ns) for one in found)


@pytest.fixture
def room() -> Iterator[None]:
    """A limit on what this process may take beside what it has: beyond it an allocation fails."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (taken + MOST_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.usefixtures("room")
def test_every_file_ends_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good, store, outside = whole(tmp_path), tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    taken = 0
    for number in range(FILES):
        draw = random.Random(number)
        format = IMPORTERS[number % len(IMPORTERS)]
        how = draw.choice(list(BENT))
        folder = outside / str(number)
        folder.mkdir()
        path = placed(folder, good[format][0], BENT[how](good[format][1], draw), draw)
        before = listing(folder)
        result = CliRunner().invoke(app, ["import", format, str(path), "--store", str(store)])
        where = (number, format, how, str(path), result.output, result.exception)
        assert result.exit_code in (0, 2), where
        assert isinstance(result.exception, SystemExit | None), where
        assert "\x1b" not in result.output, where
        assert result.exit_code == 0 or result.output.count("\n") == 1, where
        assert listing(folder) == before, where
        taken += result.exit_code == 0
    assert sorted(one.name for one in tmp_path.iterdir()) in (["outside"], ["outside", "store"])
    assert capfd.readouterr().err == ""
    assert 10 < taken < FILES - 100, "some are whole enough, most are not"
