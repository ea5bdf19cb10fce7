"""Verdicts where people already look: notes of a TensorBoard, W&B or MLflow run that a rank of the training has open.

    session = unskew.attach()
    if rank == 0:
        session.report(to_wandb(wandb.run))

Each takes what the loop has of that library, and imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unskew.collector.events import Verdict
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store

TAG, MLFLOW_NOTE = "unskew/verdict", "mlflow.note.content"


class VerdictNote(NamedTuple):
    """A verdict, or its newest revision, in one sentence; `iteration`: when it was found."""

    verdict: int
    iteration: int
    sentence: str

    @property
    def text(self) -> str:
        return f"unskew, iteration {self.iteration}: {self.sentence}"


Report = Callable[[VerdictNote], object]


def to_tensorboard(writer: Any) -> Report:
    """As text of a `SummaryWriter`, at the iteration of the verdict."""
    return lambda note: writer.add_text(TAG, note.sentence, note.iteration)


def to_wandb(run: Any) -> Report:
    """As further lines of the notes of a W&B run."""

    def report(note: VerdictNote) -> None:
        run.notes = _with(run.notes, note)

    return report


def to_mlflow(client: Any, run_id: str) -> Report:
    """As further lines of the description of a run, by an `MlflowClient`."""

    def report(note: VerdictNote) -> None:
        before = client.get_run(run_id).data.tags.get(MLFLOW_NOTE)
        client.set_tag(run_id, MLFLOW_NOTE, _with(before, note))

    return report


def _with(before: str | None, note: VerdictNote) -> str:
    return f"{before}\n{note.text}" if before else note.text


class VerdictNotes:
    """What is judged of a run, told as it is logged."""

    def __init__(self, store: Store, run: str, report: Report) -> None:
        self._tail, self._report = Tail(store, run, only="@"), report

    def look(self) -> None:
        """Report what is new. Raises what telling raises."""
        for entry in self._tail.poll():
            if isinstance(entry.event, Verdict):
                self._report(VerdictNote(entry.event.verdict, entry.event.at_iteration, entry.event.sentence))
