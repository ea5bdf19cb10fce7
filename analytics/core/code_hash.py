"""Which version of the deciding code this is: a run records it, and a replay reports whether it decides by the same."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from unskew import data


@cache
def code_hash() -> str:
    """Hash of the modules of analytics and the tables of data: another hash may decide otherwise."""
    return hash_of(Path(__file__).parents[1], Path(data.__path__[0]))


def hash_of(code: Path, tables: Path) -> str:
    """Hash of the modules in `code` and of the tables in `tables`, but not below it: stores may lie there."""
    digest = hashlib.sha256()
    for folder, pattern in ((code, "**/*.py"), (tables, "*.toml")):
        for path in sorted(folder.glob(pattern)):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
