"""Verdicts as notes in the real libraries, offline; each is skipped where it is not installed (extra `trackers`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unskew.collector.events import Verdict
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream
from unskew.runtime.attach.notes import TAG, Report, VerdictNote, to_mlflow, to_tensorboard, to_wandb
from unskew.runtime.attach.session import JobFacts, LoopSession

RUN = "run-1"
SENTENCES = ("rank 1 runs its backward pass at 0.50 of its healthy speed", "rank 0 waits for input")
TEXTS = [f"unskew, iteration {number}: {sentence}" for number, sentence in enumerate(SENTENCES)]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LoopSession]:
    """Of a run with two verdicts."""
    store = Store.locate(tmp_path / "store")
    stream = ControlStream(store, RUN, f"run/{RUN}", "controller")
    for number, sentence in enumerate(SENTENCES):
        stream.add(
            Verdict(
                verdict=number + 1, cause="slow_device", culprits=(), victims=(), since_iteration=0, at_iteration=number,
                confidence=1.0, sentence=sentence, evidence={}, config="",
            ),
            actor="controller",
        )  # fmt: skip
    stream.close()
    return LoopSession(store, RUN, lambda: JobFacts(0, 1, (), False))


def test_each_verdict_is_told_once_and_who_fails_is_left_out(session: LoopSession, capfd: pytest.CaptureFixture[str]) -> None:
    reported: list[VerdictNote] = []

    def fails(_: VerdictNote) -> None:
        raise ConnectionError("no network")

    session.report(fails)
    session.report(reported.append)
    session._report()
    session.close()
    assert [note.text for note in reported] == TEXTS
    assert capfd.readouterr().err == "unskew: verdicts are not noted any more: ConnectionError: no network\n"


def test_tensorboard_shows_them_at_their_iterations(session: LoopSession, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    writer = SummaryWriter(str(tmp_path / "logs"))
    note_all(session, to_tensorboard(writer))
    writer.close()
    found = EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    noted = found.Tensors(f"{TAG}/text_summary")
    assert [(one.step, one.tensor_proto.string_val[0].decode()) for one in noted] == [*enumerate(SENTENCES)]


def test_wandb_has_them_in_the_notes_of_its_run(session: LoopSession, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path), project="p", notes="mine") as run:
        note_all(session, to_wandb(run))
        assert run.notes == "\n".join(["mine", *TEXTS])
    wandb.teardown()  # its process


def test_mlflow_has_them_in_the_description_of_its_run(
    session: LoopSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the skinny one has no other
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    run_id = client.create_run(client.create_experiment("e")).info.run_id
    note_all(session, to_mlflow(client, run_id))
    assert client.get_run(run_id).data.tags["mlflow.note.content"] == "\n".join(TEXTS)


def note_all(session: LoopSession, to: Report) -> None:
    session.report(to)
    session._report()
