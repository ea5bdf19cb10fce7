"""Doing something with a module once it is imported: importing it here could take as long as all else at the start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def after_import(name: str, do: Callable[[ModuleType], None]) -> None:
    """Do something with a module: now where it is there, else as soon as it is; who imports it may never do so."""
    if name in sys.modules:
        do(sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, do))


class _After:
    def __init__(self, name: str, do: Callable[[ModuleType], None]) -> None:
        self._name, self._do = name, do

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._do(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec
