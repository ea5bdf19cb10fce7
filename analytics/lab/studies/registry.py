"""The studies by name."""

from __future__ import annotations

from unskew.analytics.lab.studies import bloom, failure_model, levels, others, prediction_error, scale
from unskew.analytics.lab.studies.frame import Study
from unskew.analytics.lab.studies.resihp import large, mixed, slow, table6

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        prediction_error.TABLE_4,
        table6.TABLE_6,
        slow.FIGURE_2,
        slow.FIGURE_9,
        mixed.FIGURE_10,
        mixed.FIGURE_11,
        large.LARGE,
        failure_model.RECOVER,
        failure_model.FT_HSDP,
        others.ADAPTIS,
        others.MALLEUS,
        others.WHAT_IF,
        levels.LEVELS,
        scale.SCALE,
        bloom.BLOOM,
    )
}
