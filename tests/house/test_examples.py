"""The examples of examples/ run as they stand, over what each of them needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.training.warm_processes import warm_process

EXAMPLES = ROOT / "examples"


def output_of(example: str, argument: str) -> str:
    ran = subprocess.run(
        [sys.executable, EXAMPLES / example, argument], capture_output=True, text=True, check=False, timeout=50
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_a_foreign_loop_is_recorded_diagnosed_and_asked_about(tmp_path: Path) -> None:
    diagnosis = output_of("record_own_loop.py", str(tmp_path))
    assert "mine: 200 iterations" in diagnosis
    assert "cannot be said  slow_device" in diagnosis
    assert output_of("query_log.py", str(tmp_path / "store")).startswith("mine: done, 200 iterations; ")


@pytest.mark.slow
def test_policies_are_simulated_side_by_side() -> None:
    lines = output_of("simulate.py", "2").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["checkpoint-restart", "ft-hsdp", "resihp", "unskew"]


@pytest.mark.slow
def test_a_model_and_data_of_ones_own_survive_a_death() -> None:
    code, ending = warm_process().run_script(str(EXAMPLES / "own_model.py"), "12")
    assert code == 0, ending
    assert ending.startswith("loss 4.")
    assert "in 12 iterations, done" in ending


def test_every_example_is_tried_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "own_model.py",
        "profile_ddp.py",
        "query_log.py",
        "record_own_loop.py",
        "simulate.py",
        "slow_rank.py",
        "train_fsdp2.py",
        "train_hf.py",
        "train_lightning.py",
        "train_torchtitan.py",
    }
