"""Python runs this at its start where the folder is on PYTHONPATH: a process that imports torch is then measured.

Nothing happens before `import torch` has ended. Another sitecustomize further down the path runs as if this were not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - each Python process pays for what is imported here


def chain() -> None:
    """Run the sitecustomize that this one hides."""
    rest = [path for path in sys.path if os.path.abspath(path or ".") != HERE]  # noqa: PTH100 - as above
    spec = PathFinder.find_spec("sitecustomize", rest)
    code = getattr(spec.loader, "get_code", lambda _: None)("sitecustomize") if spec is not None else None
    if spec is not None and code is not None:
        exec(code, {"__name__": "sitecustomize", "__file__": spec.origin, "__spec__": spec})


class AfterTorch:
    """Attaches when torch has been imported; an error of ours is a line on stderr."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                from unskew.runtime.attach.start import attach  # noqa: PLC0415 - for processes with torch alone

                attach()
            except Exception as error:
                print(f"unskew: nothing is measured, training goes on: {type(error).__name__}: {error}", file=sys.stderr)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


try:
    chain()
finally:
    if os.environ.get("UNSKEW") != "0":
        sys.meta_path.insert(0, AfterTorch())
