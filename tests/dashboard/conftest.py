"""A store that the dashboard reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st

from unskew.collector.paths import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("UNSKEW_STORE", str(tmp_path / "store"))
    yield Store(tmp_path / "store")
    st.cache_data.clear()
    st.cache_resource.clear()
