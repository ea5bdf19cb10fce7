"""The studies by name."""

from __future__ import annotations

from unskew.analytics.lab.studies import bloom, failure_model, others, prediction_error, scale
from unskew.analytics.lab.studies.frame import Study
from unskew.analytics.lab.studies.resihp import (
    large as resihp_large,
)
from unskew.analytics.lab.studies.resihp import (
    mixed as resihp_mixed,
)
from unskew.analytics.lab.studies.resihp import (
    slow as resihp_slow,
)
from unskew.analytics.lab.studies.resihp import (
    table6 as resihp_table6,
)

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
