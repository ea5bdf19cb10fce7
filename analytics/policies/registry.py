"""The policies by name, each as simulator and studies start it."""

from __future__ import annotations

from collections.abc import Callable

from unskew.analytics.policies.adaptra import Adaptra
from unskew.analytics.policies.base import Policy
from unskew.analytics.policies.ft_hsdp import FTHSDP
from unskew.analytics.policies.greyhound import Greyhound, Strengthened
from unskew.analytics.policies.malleus import Malleus
from unskew.analytics.policies.nothing import Nothing
from unskew.analytics.policies.ntp import NTP
from unskew.analytics.policies.oobleck import Oobleck
from unskew.analytics.policies.recover import ReCoVer
from unskew.analytics.policies.recycle import ReCycle
from unskew.analytics.policies.resihp import ResiHP
from unskew.analytics.policies.restart import Restart
from unskew.analytics.policies.unskew import Unskew

POLICIES: dict[str, Callable[[], Policy]] = {
    "none": Nothing,
    "checkpoint-restart": Restart,
    "oobleck": Oobleck,
    "recycle": ReCycle,
    "strengthened-oobleck": lambda: Strengthened(Oobleck()),
    "strengthened-recycle": lambda: Strengthened(ReCycle()),
    "greyhound": Greyhound,
    "adaptra": Adaptra,
    "malleus": Malleus,
    "ntp": NTP,
    "recover": ReCoVer,
    "ft-hsdp": FTHSDP,
    "resihp": ResiHP,
    "unskew": Unskew,
}


class PolicyError(ValueError):
    """An unknown policy; one sentence."""


def policy(name: str) -> Policy:
    """A policy by its name. Raises `PolicyError`."""
    if name not in POLICIES:
        raise PolicyError(f"--policy {name} is not known, allowed: {', '.join(POLICIES)}")
    return POLICIES[name]()
