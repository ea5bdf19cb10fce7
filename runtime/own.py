"""What somebody names as `module:function` or `path/file.py:function`: a model or data of their own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any


class OwnError(ValueError):
    """A model or data that cannot be used; the message is one sentence."""


@contextmanager
def asking(what: str) -> Iterator[None]:
    """For code of somebody's own: whatever it raises is `OwnError`, a sentence that begins with `what` went wrong."""
    try:
        yield
    except OwnError:
        raise
    except (Exception, SystemExit) as error:
        raise OwnError(f"{what}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def function_of(spec: str) -> Callable[..., Any]:
    """The function of this name; its module is looked for in the working directory, too. Raises `OwnError`."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise OwnError(f"{spec} names no function, allowed: module:function or path/file.py:function")
    with asking(f"{place} of {spec} cannot be imported"):
        module = _file(Path(place)) if place.endswith(".py") else _module(place)
    if not callable(found := getattr(module, name, None)):
        raise OwnError(f"{spec}: {place} has no function {name}")
    function: Callable[..., Any] = found
    return function


def spec_of(function: str | Callable[..., Any]) -> str:
    """What names a function for other processes. Raises `OwnError` for one that they cannot import."""
    if isinstance(function, str):
        return function
    module, name = function.__module__, function.__qualname__
    if not name.isidentifier():
        raise OwnError(f"{name} is not at the top of its module, so the ranks' processes cannot import it")
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise OwnError(f"{name} is of no file, so the ranks' processes cannot import it")
    return f"{Path(file).resolve()}:{name}"


def _module(name: str) -> Any:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _file(path: Path) -> Any:
    path = path.resolve()
    name = f"unskew_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError("there is no such file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
