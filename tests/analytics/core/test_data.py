"""The shipped tables: each row says who says so; a table that is wrong is named, with the place in it."""

from __future__ import annotations

import math

import pytest

from unskew.analytics.cluster.job import JOBS, Job
from unskew.analytics.cluster.random_faults import MIX, RATES
from unskew.analytics.core.constants import CONSTANTS
from unskew.analytics.core.device_profiles import Profile
from unskew.data import DataError, table


def test_every_row_has_a_source() -> None:
    rows = [
        *CONSTANTS.values(),
        *RATES.values(),
        *MIX.values(),
        *JOBS.values(),
        *table("profiles", dict[str, Profile]).values(),
    ]
    assert all(row.source for row in rows)
    assert all(math.isfinite(constant.value) for constant in CONSTANTS.values())
    assert all(job.peak in CONSTANTS for job in JOBS.values())


def test_a_wrong_table_is_named_with_the_place_in_it() -> None:
    with pytest.raises(DataError, match=r"data/rates.toml: Object contains unknown field .* - at `\$"):
        table("rates", dict[str, Job])
