"""The `unskew` command, also as `python -m unskew`; exit codes: 0 done, 1 the work failed, 2 bad usage or input."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """The command; where the packages it needs are not installed, it names the extra that brings them."""
    try:
        from unskew.cli import app

        app()
    except ModuleNotFoundError as error:
        name = (error.name or "unskew").partition(".")[0]
        if name == "unskew":
            link = Path(__file__).with_name("collector")
            if not link.is_file():  # a fault of ours, not of the installation
                raise
            print(
                f"{link} is a text file, where git should have made a link: clone again with core.symlinks=true, "
                "on a file system that has links, or install the wheel",
                file=sys.stderr,
            )
            sys.exit(2)
        extras = "platform,trainer" if name == "torch" else "platform"
        print(f"unskew needs {name}, which is not installed: pip install 'unskew[{extras}]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
