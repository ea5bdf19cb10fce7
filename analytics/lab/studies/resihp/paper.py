"""ResiHP's published figures (arXiv 2605.06374 v2), typed from the paper; figures 9 and 10 are readings of plot labels."""

from __future__ import annotations

MODELS = {
    "L7B": "llama2-7b", "L13B": "llama2-13b", "L30B": "llama-30b", "Q7B": "qwen2.5-7b", "Q14B": "qwen2.5-14b",
    "Q32B": "qwen2.5-32b",
}  # fmt: skip
SESSION_HOURS = {16: 4.0, 32: 8.0, 64: 16.0}
"""Devices -> length of a session: the reading of "4 to 16 h" in which one GPU per kill leaves half the cluster at 30 min."""
INTERVAL_HOURS = {"2h": 2.0, "1h": 1.0, "30m": 0.5}

FAULT_FREE = {"L7B": 8.22, "L13B": 8.05, "L30B": 5.05, "Q7B": 7.07, "Q14B": 5.89, "Q32B": 5.59}
TABLE_6: dict[str, dict[str, tuple[float | None, float | None, float | None]]] = {
    "oobleck": {
        "L7B": (6.04, 4.59, None), "L13B": (6.47, 4.79, None), "L30B": (4.48, 3.31, None), "Q7B": (5.37, 4.37, None),
        "Q14B": (4.74, 3.65, None), "Q32B": (4.47, 3.42, None),
    },
    "recycle": {
        "L7B": (4.16, 3.94, None), "L13B": (4.91, 4.66, None), "L30B": (3.48, 3.36, None), "Q7B": (4.37, 4.23, None),
        "Q14B": (3.73, 3.58, None), "Q32B": (3.58, 3.47, None),
    },
    "resihp": {
        "L7B": (7.55, 6.48, 5.46), "L13B": (7.95, 7.23, 5.95), "L30B": (4.80, 4.38, 3.53), "Q7B": (6.57, 5.95, 5.62),
        "Q14B": (5.59, 5.06, 4.45), "Q32B": (4.80, 4.23, 3.86),
    },
}  # fmt: skip
"""Samples per second at 2h, 1h, 30m; None = aborted."""

DROPS = {"W": 0.35, "M": 0.55, "S": 0.70}
FIGURE_9: dict[str, dict[str, tuple[float, float, float]]] = {
    "L7B": {"W": (1.30, 1.30, 1.81), "M": (1.40, 2.01, 2.47), "S": (1.45, 2.66, 3.31)},
    "L13B": {"W": (1.30, 1.33, 1.66), "M": (1.37, 1.80, 2.40), "S": (1.39, 2.23, 3.20)},
    "L30B": {"W": (1.13, 1.20, 1.52), "M": (1.31, 1.45, 2.02), "S": (1.36, 1.72, 2.51)},
    "Q7B": {"W": (1.06, 1.09, 1.32), "M": (1.21, 1.44, 1.76), "S": (1.32, 1.70, 2.13)},
    "Q14B": {"W": (1.19, 1.26, 1.48), "M": (1.20, 1.41, 1.83), "S": (1.29, 1.74, 2.23)},
    "Q32B": {"W": (1.13, 1.26, 1.51), "M": (1.22, 1.26, 1.74), "S": (1.20, 1.42, 1.99)},
}
"""Speed-up over the unmitigated run: Adaptra, Greyhound, ResiHP."""

FIGURE_10: dict[str, dict[str, tuple[float, float, float]]] = {
    "L7B": {"2h": (1.70, 1.97, 2.21), "1h": (1.02, 3.16, 4.39), "30m": (1.0, 1.03, 3.68)},
    "L13B": {"2h": (1.66, 1.88, 2.24), "1h": (1.0, 2.42, 3.20), "30m": (1.0, 1.0, 2.45)},
    "L30B": {"2h": (1.04, 1.78, 1.87), "1h": (1.0, 1.86, 2.32), "30m": (1.0, 0.985, 1.88)},
    "Q7B": {"2h": (1.33, 1.475, 1.62), "1h": (1.0, 1.59, 1.87), "30m": (1.0, 1.0, 1.61)},
    "Q14B": {"2h": (1.46, 1.61, 1.84), "1h": (1.02, 1.74, 2.00), "30m": (1.0, 1.0, 1.75)},
    "Q32B": {"2h": (1.02, 1.49, 1.54), "1h": (1.0, 1.56, 1.68), "30m": (0.99, 1.04, 1.48)},
}
"""Over ReCycle: strengthened ReCycle, strengthened Oobleck, ResiHP."""

FIGURE_11 = {("L7B", "2h"): (1.01, 0.18, 1.03), ("L13B", "1h"): (1.82, 0.22, 1.16), ("L30B", "30m"): (1.47, 0.17, 0.24)}
"""Normalised to ReCycle: with exclusion (contains the baseline's 1.0), then what repartition and migration add."""

FIGURE_2 = {"node": 1.00, "TP": 4.75, "PP": 19.13, "DP": 25.43}
FIGURE_2_RESIHP = {"node": 0.64, "TP": 2.03, "PP": 8.72, "DP": 11.14}
