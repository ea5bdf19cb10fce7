"""Numbers and parties as words: one way to write a duration, a ratio, a rank, everywhere on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unskew.collector.events import DeviceKind, Party, Verdict

CAUSES = {
    "slow_device": "slow device",
    "slow_link": "slow link",
    "dead": "dead",
    "hung": "hung",
    "long_sequences": "long sequences",
    "stage_imbalance": "stage imbalance",
    "input_bound": "input bound",
    "gc_pause": "garbage collection",
    "unknown": "cause unknown",
}


def duration(us: float | None) -> str:
    """Microseconds as "812 ms" or "1.31 s"; a dash when not measured.

    >>> duration(812_400), duration(1_310_000), duration(None)
    ('812 ms', '1.31 s', '–')
    """
    if us is None:
        return "–"
    if abs(us) < 1_000:
        return f"{us:.0f} µs"
    if abs(us) < 9_950:
        return f"{us / 1e3:.1f} ms"
    if abs(us) < 999_500:
        return f"{us / 1e3:.0f} ms"
    if abs(us) < 120e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 60e6:.1f} min"


def ago(seconds: float) -> str:
    """An age: "0.4 s ago", "42 s ago", "3 min ago", "5 h ago", "2 days ago"."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s ago"
    for limit, size, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"


def signed_percent(fraction: float) -> str:
    """A difference as "+3 %" or "−24 %" (a true minus sign)."""
    return f"{'−' if fraction < -0.0005 else '+'}{abs(fraction) * 100:.{0 if abs(fraction) >= 0.0995 else 1}f} %"


def count(number: int, noun: str, plural: str = "") -> str:
    """ "1 layer", "4 layers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, runs joined: "0–2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs)


def parties(members: Sequence[Party]) -> str:
    """Who is meant: "rank 3", "ranks 0–2, 5", "link 2–3", "stage 1", "replica 0"."""
    ranks = [party.rank for party in members if party.kind == "device" and party.rank is not None]
    words = [f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"] if ranks else []
    words += [f"link {party.link[0]}–{party.link[1]}" for party in members if party.link is not None]
    words += [f"stage {party.stage}" for party in members if party.stage is not None]
    words += [f"replica {party.replica}" for party in members if party.replica is not None]
    return ", ".join(words) or "nobody"


def culprits(verdict: Verdict) -> str:
    """Who is named, "the whole job" where all are slower alike."""
    return "the whole job" if verdict.evidence.get("scope") == "job" else parties(verdict.culprits)


def speeds(speed: Mapping[str, float]) -> str:
    """Speed per kind of work, healthy = 1.00: "speed 0.55", or "speed F 0.55, B 0.60" where the kinds differ."""
    kinds = sorted(speed, key="FBW".find)
    if len({round(value, 2) for value in speed.values()}) == 1:
        return f"speed {speed[kinds[0]]:.2f}"
    return "speed " + ", ".join(f"{kind} {speed[kind]:.2f}" for kind in kinds)


CHUNK_CLOCKS: dict[DeviceKind | None, str] = {
    "sleep": "by the emulated device's clock",
    "cores": "without the time spent waiting for a core",
    "gpus": "by the GPU's clock",
    "shared_gpus": "by the GPU's clock, with what other ranks computed on it meanwhile",
}
"""How chunk times are taken, where it is not by the clock of the iterations."""
