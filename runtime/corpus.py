"""Text files -> documents of bytes, each short enough for a micro-batch.

A file is a document. One longer than a micro-batch is cut after its last blank line that fits, else after its last line break,
else at the limit: the pieces keep the uneven lengths of real text.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

_LEAST_BYTES = 16
_MOST_BYTES = 16 << 20
_NOT_TEXT_OF_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class CorpusError(ValueError):
    """A corpus that cannot be used; the message is one sentence."""


class Corpus:
    """Documents as slices of one byte array, shared by all ranks that are forked after it is loaded."""

    def __init__(self, documents: list[bytes]) -> None:
        self.data = np.frombuffer(b"".join(documents), dtype=np.uint8)
        self.ends = np.cumsum([len(document) for document in documents])
        # A document of n bytes has n - 1 tokens: each byte but the last, with the next byte as its target.
        self.lengths = [len(document) - 1 for document in documents]

    def length(self, index: int) -> int:
        """Its tokens."""
        return self.lengths[index]

    def document(self, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of one document, `lengths[index] + 1` of them."""
        end = int(self.ends[index])
        return self.data[end - self.lengths[index] - 1 : end]


def load_corpus(folder: str | None, max_tokens: int) -> Corpus:
    """The text files under `folder` (None = the running interpreter's standard library), cut to at most `max_tokens` tokens.

    Files are read in the order of their names, up to 16 MiB; files that are not text are left out. Raises `CorpusError` when
    too little text is found.
    """
    documents = [piece for text in _texts(folder) for piece in cut(text, max_tokens + 1)]
    if not documents:
        raise _no_text(folder)
    return Corpus(documents)


def check_folder(folder: Path) -> None:
    """Raise `CorpusError` unless `folder` is one with a file of text."""
    if not folder.is_dir():
        raise CorpusError(f"--corpus {folder} is not a folder, allowed: a folder of text files")
    if not any(len(text) >= _LEAST_BYTES for text in _texts(str(folder))):
        raise _no_text(str(folder))


def _no_text(folder: str | None) -> CorpusError:
    return CorpusError(
        f"--corpus {folder} holds no text, allowed: a folder with files of text, at least {_LEAST_BYTES} bytes each"
    )


def _texts(folder: str | None) -> Iterator[bytes]:
    root = Path(folder) if folder is not None else Path(sysconfig.get_path("stdlib"))
    skipped: Collection[str] = () if folder is not None else _NOT_TEXT_OF_THE_LIBRARY
    left = _MOST_BYTES
    files = [path for path in _files(root, skipped) if folder is not None or path.suffix == ".py"]
    for path in sorted(files):
        if not path.is_file():
            continue
        text = path.read_bytes()
        if b"\0" in text[:4096]:
            continue
        yield text
        left -= len(text)
        if left <= 0:
            return


def _files(root: Path, skipped: Collection[str]) -> Iterator[Path]:
    """Whatever lies under a folder and is none itself; folders of the names `skipped` are not entered."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        yield from (Path(folder, name) for name in names)


def cut(text: bytes, max_bytes: int) -> Iterator[bytes]:
    """Pieces of at most `max_bytes`, cut where the text itself pauses; pieces of under 16 bytes are left out.

    >>> [len(piece) for piece in cut(b"x" * 20 + b"\\n\\n" + b"y" * 20, 30)]
    [22, 20]
    """
    start = 0
    while start < len(text):
        end = min(start + max_bytes, len(text))
        if end < len(text):
            for pause in (b"\n\n", b"\n"):
                found = text.rfind(pause, start + _LEAST_BYTES, end)
                if found >= 0:
                    end = found + len(pause)
                    break
        if end - start >= _LEAST_BYTES:
            yield text[start:end]
        start = end
