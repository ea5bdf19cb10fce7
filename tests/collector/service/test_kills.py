"""A kill -9 in the midst of sealing, publishing, merging or rebuilding changes no answer, and the work is done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from unskew.benchmarks import store_faults


@pytest.mark.limit(300)
def test_a_kill_in_the_midst_of_each_part_changes_no_answer(tmp_path: Path) -> None:
    (wrong,) = store_faults.aimed(tmp_path, kills=1)
    assert wrong.value == 0, wrong.note
    assert "1 seal, 1 publish, 2 compaction, 1 rebuild" in wrong.note
