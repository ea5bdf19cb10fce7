"""The policies by name, each as simulator and studies start it."""

from __future__ import annotations

from collections.abc import Callable

from unskew.analytics.policies.base import Policy
from unskew.analytics.policies.joint import JointPolicy
from unskew.analytics.policies.nothing import NothingPolicy
from unskew.analytics.policies.papers.adaptra import AdaptraPolicy
from unskew.analytics.policies.papers.bamboo import BambooPolicy
from unskew.analytics.policies.papers.ft_hsdp import FtHsdpPolicy
from unskew.analytics.policies.papers.greyhound import GreyhoundPolicy, StrengthenedPolicy
from unskew.analytics.policies.papers.malleus import MalleusPolicy
from unskew.analytics.policies.papers.ntp import NtpPolicy
from unskew.analytics.policies.papers.oobleck import OobleckPolicy
from unskew.analytics.policies.papers.recover import RecoverPolicy
from unskew.analytics.policies.papers.recycle import RecyclePolicy
from unskew.analytics.policies.papers.resihp import ResihpPolicy
from unskew.analytics.policies.restart import RestartPolicy
from unskew.analytics.policies.unskew import UnskewPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "none": NothingPolicy,
    "checkpoint-restart": RestartPolicy,
    "oobleck": OobleckPolicy,
    "bamboo": BambooPolicy,
    "recycle": RecyclePolicy,
    "recycle-staggered": lambda: RecyclePolicy(staggered=True),
    "strengthened-oobleck": lambda: StrengthenedPolicy(OobleckPolicy()),
    "strengthened-recycle": lambda: StrengthenedPolicy(RecyclePolicy(staggered=True), "strengthened-recycle"),
    "greyhound": GreyhoundPolicy,
    "adaptra": AdaptraPolicy,
    "malleus": MalleusPolicy,
    "ntp": NtpPolicy,
    "recover": RecoverPolicy,
    "ft-hsdp": FtHsdpPolicy,
    "resihp": ResihpPolicy,
    "resihp-tp": lambda: ResihpPolicy(frozenset({"tp"})),
    "joint": JointPolicy,
    "unskew": UnskewPolicy,
}


class PolicyError(ValueError):
    """An unknown policy; one sentence."""


def policy(name: str) -> Policy:
    """A policy by its name. Raises `PolicyError`."""
    if name not in POLICIES:
        raise PolicyError(f"{name} is not known, allowed: {', '.join(POLICIES)}")
    return POLICIES[name]()
