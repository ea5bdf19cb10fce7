"""Public data sets for tests: skipped, with the reason, where they are absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from unskew.benchmarks import datasets


def dataset(name: str, *parts: str) -> Path:
    """A file of the data set `name`; skips the test when it is not here."""
    path = datasets.find(name, *parts)
    if path is None:
        pytest.skip(f"data set {'/'.join((name, *parts))} is absent: set UNSKEW_DATASETS to the folder of data sets")
    return path
