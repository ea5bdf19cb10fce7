"""The studies by name."""

from __future__ import annotations

from unskew.analytics.studies import (
    bloom,
    failure_model,
    others,
    prediction_error,
    resihp_large,
    resihp_mixed,
    resihp_slow,
    resihp_table6,
    scale,
)
from unskew.analytics.studies.frame import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        prediction_error.TABLE_4,
        resihp_table6.TABLE_6,
        resihp_slow.FIGURE_2,
        resihp_slow.FIGURE_9,
        resihp_mixed.FIGURE_10,
        resihp_mixed.FIGURE_11,
        resihp_large.LARGE,
        failure_model.RECOVER,
        failure_model.FT_HSDP,
        others.ADAPTIS,
        others.MALLEUS,
        others.WHAT_IF,
        scale.SCALE,
        bloom.BLOOM,
    )
}
