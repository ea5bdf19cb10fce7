"""Where public data sets lie, for tests and benches that have a use for them: $UNSKEW_DATASETS, else beside the checkout.

Nothing in the project needs them.
"""

from __future__ import annotations

import os
from pathlib import Path


def find(name: str, *parts: str) -> Path | None:
    """A file (or the folder) of the data set `name`; None when it is not here."""
    root = os.environ.get("UNSKEW_DATASETS")
    folder = Path(root) if root else Path(__file__).resolve().parents[1].parent / "shared" / "datasets"
    path = folder.joinpath(name, *parts)
    return path if path.exists() else None
