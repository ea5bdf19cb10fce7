"""What a service or a rank reports on stderr, which whoever started it points at a file of the store."""

from __future__ import annotations

import sys
from contextlib import suppress


def report(text: str) -> None:
    """One or more lines; a disk that refuses them ends nobody."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
