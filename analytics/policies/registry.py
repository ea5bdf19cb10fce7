"""The policies by name, each as simulator and studies start it."""

from __future__ import annotations

from collections.abc import Callable

from unskew.analytics.policies.adaptra import AdaptraPolicy
from unskew.analytics.policies.bamboo import BambooPolicy
from unskew.analytics.policies.base import Policy
from unskew.analytics.policies.ft_hsdp import FtHsdpPolicy
from unskew.analytics.policies.greyhound import GreyhoundPolicy, StrengthenedPolicy
from unskew.analytics.policies.malleus import MalleusPolicy
from unskew.analytics.policies.nothing import NothingPolicy
from unskew.analytics.policies.ntp import NtpPolicy
from unskew.analytics.policies.oobleck import OobleckPolicy
from unskew.analytics.policies.recover import RecoverPolicy
from unskew.analytics.policies.recycle import RecyclePolicy
from unskew.analytics.policies.resihp import ResihpPolicy
from unskew.analytics.policies.restart import RestartPolicy
from unskew.analytics.policies.unskew import UnskewPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "none": NothingPolicy,
    "checkpoint-restart": RestartPolicy,
    "oobleck": OobleckPolicy,
    "bamboo": BambooPolicy,
    "recycle": RecyclePolicy,
    "strengthened-oobleck": lambda: StrengthenedPolicy(OobleckPolicy()),
    "strengthened-recycle": lambda: StrengthenedPolicy(RecyclePolicy()),
    "greyhound": GreyhoundPolicy,
    "adaptra": AdaptraPolicy,
    "malleus": MalleusPolicy,
    "ntp": NtpPolicy,
    "recover": RecoverPolicy,
    "ft-hsdp": FtHsdpPolicy,
    "resihp": ResihpPolicy,
    "unskew": UnskewPolicy,
}


class PolicyError(ValueError):
    """An unknown policy; one sentence."""


def policy(name: str) -> Policy:
    """A policy by its name. Raises `PolicyError`."""
    if name not in POLICIES:
        raise PolicyError(f"{name} is not known, allowed: {', '.join(POLICIES)}")
    return POLICIES[name]()
