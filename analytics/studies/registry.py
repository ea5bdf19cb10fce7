"""The studies by name."""

from __future__ import annotations

from unskew.analytics.studies import bloom, failure_model, others, prediction_error, resihp
from unskew.analytics.studies.frame import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        prediction_error.TABLE_4,
        resihp.TABLE_6,
        resihp.FIGURE_2,
        resihp.FIGURE_9,
        resihp.FIGURE_10,
        resihp.FIGURE_11,
        resihp.LARGE,
        failure_model.RECOVER,
        failure_model.FT_HSDP,
        others.ADAPTIS,
        others.MALLEUS,
        others.WHAT_IF,
        others.SCALE,
        bloom.BLOOM,
    )
}
