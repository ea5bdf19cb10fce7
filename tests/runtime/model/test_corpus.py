"""Documents from text: nothing but a short scrap is lost, nothing is too long, and cuts lie where the text pauses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.runtime.corpus import CorpusError, cut, load_corpus

LEAST = 16


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(lengths=st.lists(st.integers(0, 70), max_size=30), max_bytes=st.integers(LEAST + 1, 90))
def test_pieces_are_the_text_but_for_a_scrap_at_its_end(lengths: list[int], max_bytes: int) -> None:
    text = b"\n".join(b"x" * length for length in lengths)
    pieces = list(cut(text, max_bytes))
    assert all(LEAST <= len(piece) <= max_bytes for piece in pieces)
    whole = b"".join(pieces)
    assert text.startswith(whole)
    assert len(text) - len(whole) < LEAST
    assert all(piece.endswith(b"\n") or len(piece) == max_bytes for piece in pieces[:-1])


def test_a_documents_tokens_are_its_bytes_but_the_last(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"the first document, of one line\n")
    (tmp_path / "b.bin").write_bytes(b"\0\1\2" * 50)
    (tmp_path / "c.txt").write_bytes(b"x" * 40)
    corpus = load_corpus(str(tmp_path), 24)
    assert [bytes(corpus.document(index)) for index in range(len(corpus.lengths))] == [
        b"the first document, of on",
        b"x" * 25,
    ]
    assert corpus.lengths == [24, 24]


def test_a_folder_without_text_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"--corpus .* holds no text, allowed: a folder with files of text"):
        load_corpus(str(tmp_path), 64)
