"""Rich's console, on which no text of anybody's is an order to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from unskew.terminal.safe_text import harmless


class SafeConsole(Console):
    """What Rich itself sends to move the cursor passes; what stands in a text is shown."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As Rich's."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text, sys.maxsize), segment.style)
