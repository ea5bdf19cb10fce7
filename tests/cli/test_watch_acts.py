"""`unskew watch --mode auto`: a slow rank gets fewer samples while training goes on, and the log says what that was worth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unskew
from unskew.cli import app
from unskew.data import DEMO

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
import unskew

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): time.sleep(EACH_S * len(g)); return g

dist.init_process_group("gloo")
torch.set_num_threads(1)
EACH_S = 0.006 if dist.get_rank() == 1 else 0.002
data = torch.randn(8 * STEPS, 64)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = unskew.attach()
for x in session.balance(DataLoader(data, batch_size=4, sampler=DistributedSampler(data))):
    optimizer.zero_grad()
    Slow.apply(model(x)).square().mean().backward()
    optimizer.step()
"""
STEPS = 200


@pytest.mark.alone
@pytest.mark.limit(150)
def test_a_slow_rank_gets_fewer_samples_and_the_change_is_scored(tmp_path: Path) -> None:
    script, store, html = tmp_path / "train.py", tmp_path / "store", tmp_path / "report.html"
    script.write_text(SCRIPT.replace("STEPS", str(STEPS)))
    ours = ["watch", "--store", str(store), "--mode", "auto", "--json", str(tmp_path / "w.json"), "--html", str(html)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command = [sys.executable, "-m", "unskew", *ours, "--", *torchrun]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=130)
    assert done.returncode == 0, done.stderr
    first, changed, *_ = json.loads((tmp_path / "w.json").read_text())["plans"]
    assert (first["epoch"], changed["epoch"]) == (0, 1)
    assert changed["n"] >= 10, done.stderr
    with unskew.open(store) as log:
        ((change, status),) = log.sql("select change, status from proposals where proposal = 'p1'").rows()
        counts = re.fullmatch(r"rank 0: (\d) samples; rank 1: (\d) samples", change)
        assert counts is not None
        assert int(counts[1]) + int(counts[2]) == 8
        assert int(counts[1]) >= 5
        assert status == "applied"
        after = "select count(*) from iterations where iteration >= (select from_iteration from plans where plan_version = 1)"
        assert log.sql(f"{after} and plan_version != 1").item() == 0
        own = "select plan_version, median(compute_us) from spans where rank = 1 and kind = 'B' group by 1 order by 1"
        (_, before_us), (_, after_us) = log.sql(own).rows()
        assert after_us < 0.75 * before_us
    assert change in html.read_text()


def test_a_report_needs_nothing_from_outside(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    with unskew.open(DEMO) as log:
        (run,) = log.sql("select run from runs")["run"]
    done = CliRunner().invoke(app, ["watch", run, "--store", str(DEMO), "--html", str(html)])
    assert done.exit_code == 0, done.output
    found: list[tuple[str, str]] = []

    class Finder(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend((tag, name) for name, _ in attrs)

    Finder().feed(html.read_text())
    assert {"svg", "rect", "polyline", "article"} <= {tag for tag, _ in found}
    assert not {tag for tag, _ in found} & {"script", "link", "img", "iframe"}
    assert not {name for _, name in found} & {"src", "href", "onclick"}
    assert "url(" not in html.read_text()


@pytest.mark.parametrize("target", ["no-such-command-here", "http://user:secret@host/", "'unclosed"])
def test_what_replaces_a_device_is_checked_before_anything_starts(tmp_path: Path, target: str) -> None:
    done = CliRunner().invoke(app, ["watch", "--store", str(tmp_path / "s"), "--replace", target, "--", "true"])
    assert done.exit_code == 2
    assert "--replace" in done.output
    assert not (tmp_path / "s").exists()
