"""Text that somebody else wrote, as a terminal may have it: names, notes and messages of stores and files from anywhere."""

from __future__ import annotations

MOST = 2_000
"""Characters of one text; the log has all of it."""
_SHOWN_AS: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys([*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)], "\ufffd"),
}
"""What moves the cursor, colours, renames the window, turns the direction of writing or cannot be encoded -> what stands
for it."""


def harmless(text: str, most: int = MOST) -> str:
    """`text` with each character that is an order to the terminal shown as a sign, cut where it is longer than `most`."""
    shown = text.translate(_SHOWN_AS)
    return shown if len(shown) <= most else f"{shown[:most]}… ({len(shown):,} characters)"
