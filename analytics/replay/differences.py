"""Where two records of the same events differ: found again by identity, compared field by field, numbers within 1e-9.

Texts for people are left out: a sentence may be worded better without any decision being another. So are, in a run of another
version of the code, fields that came since then, which stand at their defaults, and the hash of the thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, isnan
from typing import Any

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.collector.events import (
    Event,
    IterationJudged,
    PlanKept,
    PlanProposed,
    PlanScored,
    PredictorFitted,
    Probed,
    StandbyMeasured,
    Verdict,
    VerdictClosed,
    VerdictScored,
    tag_of,
)

_EXACTNESS = 1e-9
_SHORT = 120
IDENTITY: dict[type[Event], tuple[str, ...]] = {
    IterationJudged: ("iteration",),
    PredictorFitted: ("predictor",),
    Verdict: ("verdict", "at_iteration"),
    VerdictClosed: ("verdict",),
    VerdictScored: ("verdict",),
    Probed: ("at_iteration",),
    StandbyMeasured: ("rank", "watermark"),
    PlanScored: ("plan_version",),
    PlanProposed: ("optional", "plan_version", "at_iteration"),
    PlanKept: ("plan_version", "at_iteration"),
}
"""The events that are decided, and the fields by which each is found again."""
AS_LOGGED = (PlanProposed, PlanKept, PlanScored, Probed)
"""Those that a watched training takes from its log."""
_NAMED_LIVE = ("proposal",)
"""Fields that only the live run can fill."""
_OF_THE_CODE = ("config",)
"""Fields that tell which version decided, not what: one that has a threshold more hashes the same thresholds otherwise."""
_TEXTS = frozenset({"change", "detail", "name", "reason", "sentence", "void"})
"""Texts for people, fields of an event or within one: what counts is whether there is one."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """An event that is not the same in record and replay; None = it is only in the other. `fields`: where they differ."""

    event: str
    identity: dict[str, Any]
    fields: tuple[str, ...]
    recorded: dict[str, Any] | None
    replayed: dict[str, Any] | None

    @property
    def sentence(self) -> str:
        which = f"{self.event} ({', '.join(f'{name} {value}' for name, value in self.identity.items())})"
        if self.recorded is None:
            return f"{which} is only in the replay"
        if self.replayed is None:
            return f"{which} is only in the record"
        name = self.fields[0]
        where, was, now = _first_leaf(name, self.recorded.get(name), self.replayed.get(name))
        more = f" (and {len(self.fields) - 1} more fields)" if len(self.fields) > 1 else ""
        return f"{which}: {where} was {_short(was)}, replayed {_short(now)}{more}"


def differences(recorded: Sequence[Event], replayed: Sequence[Event], *, same_code: bool) -> tuple[Difference, ...]:
    """What is not the same in both, in the order of the record, then what only the replay has. `same_code`: one version of the
    code decided both."""
    was, now = _by_identity(recorded), _by_identity(replayed)
    left_out = {*_NAMED_LIVE, *(() if same_code else _OF_THE_CODE)}
    found = []
    for key in (*was, *(key for key in now if key not in was)):
        fields = tuple(
            name
            for name in sorted({*was.get(key, {}), *now.get(key, {})} - left_out)
            if not _same_field(name, was.get(key, {}), now.get(key, {}))
        )
        if key not in was or key not in now or fields:
            found.append(
                Difference(
                    event=key[0].partition("@")[0],
                    identity=dict(key[1]),
                    fields=fields,
                    recorded=was.get(key),
                    replayed=now.get(key),
                )
            )
    return tuple(found)


_Key = tuple[str, tuple[tuple[str, Any], ...]]


def _by_identity(events: Sequence[Event]) -> dict[_Key, dict[str, Any]]:
    found: dict[_Key, dict[str, Any]] = {}
    for event in events:
        names = IDENTITY[type(event)]
        # As a reader of the log sees it: tuples are lists, keys of dictionaries texts.
        data = msgspec.json.decode(msgspec.json.encode(_with_defaults(event)))
        logged_as = {field.name: field.encode_name for field in msgspec.structs.fields(event)}
        found[tag_of(type(event)), tuple((logged_as[name], getattr(event, name)) for name in names)] = data
    return found


def _with_defaults(event: Event) -> Event:
    """With each field of its cost model, those included that were not there yet when it was written."""
    if not isinstance(event, PredictorFitted):
        return event
    model = msgspec.convert(event.model, CostModel)
    return msgspec.structs.replace(event, model=msgspec.to_builtins(model, str_keys=True))


def _same_field(name: str, was: dict[str, Any], now: dict[str, Any]) -> bool:
    one, other = was.get(name), now.get(name)
    return bool(one) == bool(other) if name in _TEXTS else _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() - _TEXTS == other.keys() - _TEXTS and all(_same_field(name, one, other) for name in {*one, *other})
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        if not (isinstance(one, (int, float)) and isinstance(other, (int, float))):
            return False
        return isclose(one, other, rel_tol=_EXACTNESS, abs_tol=_EXACTNESS) or (isnan(one) and isnan(other))
    return bool(one == other)


def _first_leaf(where: str, was: Any, now: Any) -> tuple[str, Any, Any]:
    """The first place within a field where both differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted({*was, *now}):
            if not _same_field(name, was, now):
                return _first_leaf(f"{where}.{name}", was.get(name), now.get(name))
    if isinstance(was, list) and isinstance(now, list):
        for place, (one, other) in enumerate(zip(was, now, strict=False)):
            if not _same(one, other):
                return _first_leaf(f"{where}[{place}]", one, other)
        return f"the number of {where}", len(was), len(now)
    return where, was, now


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"
