"""What is said of a run that nobody has judged, by the view `outcomes` and by analytics/core/outcome.py alike."""

from __future__ import annotations

NO_END = "the run's log has no end, and no controller is known to hold it"
NOTHING = "nothing in the log can be judged"
NOT_IMPORTED = "nobody has judged this imported run yet"
SIMULATED = "in a simulated run nobody judges the devices"
TOO_SHORT = "the run was over before its iterations could be judged"
WARM_UP = "warm-up, the iterations cannot be compared with a prediction yet"
OLD_DIAGNOSIS = "it was diagnosed by a version that did not state what it would have seen"
NONE_SLOWER = "no rank is slower than the others by {} or more; the whole job cannot be judged: "
"""Where only the whole job cannot be judged: what people ask is answered first."""
MOST_STATED = 10
"""Where no slowdown of so many times would have been named, by how much more one would is no statement."""
HIDDEN = "times vary so much by themselves that no lasting slowdown of {} up to ten times would have been named for sure"
