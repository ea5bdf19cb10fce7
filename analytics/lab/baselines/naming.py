"""The verdicts of a method that names ranks one at a time and takes them back: numbers, openings and closings."""

from __future__ import annotations

from typing import Any

from unskew.analytics.detector.detector_state import Verdicts
from unskew.collector.events import Party, Verdict, VerdictClosed


class VerdictNames:
    """Who is flagged by one method, under which number."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._open: dict[int, int] = {}
        self._next = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._open))

    def flag(
        self, rank: int, speed: dict[str, float], *, since: int, at: int, sentence: str, evidence: dict[str, Any]
    ) -> Verdicts:
        """A verdict, unless the rank already is flagged. Published methods give no confidence: 1.0."""
        if rank in self._open:
            return ()
        self._open[rank] = self._next
        self._next += 1
        return (
            Verdict(
                verdict=self._open[rank],
                cause="slow_device",
                culprits=(Party(kind="device", rank=rank),),
                speed=speed,
                since_iteration=since,
                at_iteration=at,
                confidence=1.0,
                sentence=sentence,
                evidence=evidence,
                config=self._method,
            ),
        )

    def acquit(self, rank: int, at: int, reason: str) -> Verdicts:
        if rank not in self._open:
            return ()
        return (VerdictClosed(verdict=self._open.pop(rank), until_iteration=at, at_iteration=at, reason=reason),)
