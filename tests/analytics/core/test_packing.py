"""Packing: a pure function of (lengths, seed, iteration) that wastes little and loses no document for ever."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.packing import PackingError, pack

LENGTHS = np.clip(np.random.default_rng(7).lognormal(5.0, 0.9, 5000), 16, 512).astype(int).tolist()


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=40, max_size=200),
    seed=st.integers(0, 2**32),
    iteration=st.integers(0, 10**9),
    micro_batches=st.integers(1, 6),
)
def test_a_document_is_packed_at_most_once_and_no_micro_batch_is_too_long_or_empty(lengths, seed, iteration, micro_batches):
    try:
        packed = pack(lengths, seed=seed, iteration=iteration, micro_batches=micro_batches, max_tokens=64)
    except PackingError:
        assert sum(lengths) < micro_batches * 64  # only a corpus that is really too small is refused
        return
    documents = [document for micro_batch in packed for document in micro_batch]
    assert len(packed) == micro_batches
    assert len(documents) == len(set(documents))
    assert all(0 < sum(lengths[document] for document in micro_batch) <= 64 for micro_batch in packed)


def test_micro_batches_are_filled_as_a_stream_fills_them_and_of_different_work():
    iterations = [pack(LENGTHS, seed=1, iteration=i, micro_batches=16, max_tokens=512) for i in range(10)]
    tokens = [sum(LENGTHS[d] for d in micro_batch) for packed in iterations for micro_batch in packed]
    squares = [sum(LENGTHS[d] ** 2 for d in micro_batch) for packed in iterations for micro_batch in packed]
    assert 0.6 * 512 < np.mean(tokens) < 0.95 * 512
    assert np.std(tokens) > 0.1 * np.mean(tokens)
    assert np.std(squares) > 0.3 * np.mean(squares)


def test_every_document_has_its_turn_and_no_two_iterations_are_equal():
    lengths = LENGTHS[:60]
    iterations = [pack(lengths, seed=1, iteration=i, micro_batches=4, max_tokens=512) for i in range(100)]
    assert {d for packed in iterations for micro_batch in packed for d in micro_batch} == set(range(60))
    assert len(set(iterations)) == 100


def test_another_process_packs_the_same():
    code = (
        "import json, sys; from unskew.analytics.core.packing import pack;"
        "print(pack(json.load(sys.stdin), seed=3, iteration=1_000_000, micro_batches=8, max_tokens=512))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        input=str(LENGTHS),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "17"},
    )
    assert answer.stdout.strip() == str(pack(np.array(LENGTHS), seed=3, iteration=1_000_000, micro_batches=8, max_tokens=512))


def test_a_corpus_that_cannot_fill_the_batch_is_refused_in_a_sentence():
    with pytest.raises(PackingError, match="too small: its 3 documents fill 1 micro-batches of 512 tokens, 2 are needed"):
        pack([100, 100, 100], seed=0, iteration=0, micro_batches=2, max_tokens=512)
    with pytest.raises(PackingError, match="document 0 has 513 tokens, allowed are 1 to 512"):
        pack([513], seed=0, iteration=0, micro_batches=1, max_tokens=512)
