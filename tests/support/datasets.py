"""Where public data sets lie, for tests and benches that have a use for them: $UNSKEW_DATASETS, else beside the checkout.

Nothing in the project needs them.
"""

from __future__ import annotations

import os
from pathlib import Path

from support.paths import ROOT


def find(name: str, *parts: str) -> Path | None:
    """A file (or the folder) of the data set `name`; None when it is not here."""
    root = os.environ.get("UNSKEW_DATASETS")
    folder = Path(root) if root else ROOT.parent / "shared" / "datasets"
    path = folder.joinpath(name, *parts)
    return path if path.exists() else None


def dataset(name: str, *parts: str) -> Path:
    """The same for a test, which is skipped, with the reason, when the file is not here."""
    import pytest  # noqa: PLC0415 - benches are run where there is no pytest

    path = find(name, *parts)
    if path is None:
        pytest.skip(f"data set {'/'.join((name, *parts))} is absent: set UNSKEW_DATASETS to the folder of data sets")
    return path
