"""Aggregates of the log, kept up to date by the collector: iterations, verdicts on ranks, rollups, writers, health, decisions.

A published file holds the aggregates of some sealed files; readers add those of the rest (definitions.py: why that is right).
"""

from __future__ import annotations

from unskew.collector.projections.publishing import check, damaged_files, publish, rebuild

__all__ = ["check", "damaged_files", "publish", "rebuild"]
