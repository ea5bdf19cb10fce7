"""Python files as the tests of the house read them, each once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import msgspec


class SourceFile(msgspec.Struct, frozen=True):
    """Every module that a file names in an import, at whatever depth; what it calls; its texts, documentation excepted."""

    imports: list[str]
    calls: set[str]
    texts: list[str]


@cache
def read(path: Path) -> SourceFile:
    imports, calls, texts, documentation = list[str](), set[str](), dict[int, str](), set[int]()
    tree = ast.parse(path.read_text())  # kept meanwhile: nodes are known by their places in memory
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                imports += [alias.name for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0, f"{path}:{node.lineno} imports relatively, which the folder layout does not carry"
                imports += [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Call():
                calls.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
            case ast.Expr():
                documentation.add(id(node.value))
            case ast.Constant(value=str(text)):
                texts[id(node)] = text
    return SourceFile(imports, calls, [text for number, text in texts.items() if number not in documentation])
