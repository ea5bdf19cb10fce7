"""Whether the disk of a store takes what ranks write; where it does not, a training is not seen, or not to its end."""

from __future__ import annotations

from tempfile import TemporaryFile

from unskew.collector.paths import Store

ROOM_BYTES = 64 * 1024
"""One that has no room for so much takes no lines for long."""


def refusal(store: Store) -> str:
    """Why it takes no lines now; "" = it does."""
    try:
        with TemporaryFile(dir=store.root) as file:
            file.write(bytes(ROOM_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def unseen(store: Store, run: str) -> str:
    """Why no rank was seen in a command that has ended."""
    folder, why = store.spool(run), refusal(store)
    began = folder.is_dir() and any(path.name.startswith("rank-") for path in folder.iterdir())
    if began or why:
        ranks = "ranks trained in the command, and" if began else "whether the command trained is not known:"
        return f"{ranks} nothing of it could be written to {store.root}{f': {why}' if why else ''}"
    return "no training was seen in the command: none of its Python processes called backward() with Unskew at hand"
