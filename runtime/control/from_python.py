"""`unskew.train`: a run that a program asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from unskew.analytics.cluster.random_faults import parse_all
from unskew.collector.decoding import complaint
from unskew.collector.paths import Store
from unskew.runtime.control import launch
from unskew.runtime.control.allowed import check, check_together
from unskew.runtime.control.summary import Summary
from unskew.runtime.options import OptionsError, RunOptions, asked_for
from unskew.runtime.own import spec_of


def train(
    model: str | Callable[[], Any] | None,
    data: str | Callable[..., Any] | None,
    faults: Sequence[str],
    options: Mapping[str, Any],
) -> Summary:
    """One run, to its end. Raises `ValueError` for bad options before anything starts."""
    allowed = [*asked_for(RunOptions), "store"]
    if unknown := sorted(options.keys() - {*allowed}):
        raise OptionsError(f"{unknown[0]} is not an option, allowed: {', '.join(allowed)}")
    check_together(options.keys())
    named = {name: spec_of(one) for name, one in (("model", model), ("data", data)) if one is not None}
    try:
        given = {**options, "store": str(Store.locate(options.get("store")).root)}
        chosen = msgspec.convert({**given, **named}, RunOptions)
    except msgspec.ValidationError as error:
        raise OptionsError(f"options of unskew.train: {complaint(error)}") from error
    chosen = launch.prepared(chosen)
    check(chosen)
    parsed = parse_all(faults, chosen.first_plan(), iterations=chosen.iterations)
    return launch.run(msgspec.structs.replace(chosen, faults=parsed))
