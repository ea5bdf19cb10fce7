"""The `unskew` command, also as `python -m unskew`; exit codes: 0 done, 1 the work failed, 2 bad usage or input."""

from __future__ import annotations

import sys


def main() -> None:
    """The command; where the packages it needs are not installed, it names the extra that brings them."""
    try:
        from unskew.cli import app

        app()
    except ModuleNotFoundError as error:
        name = (error.name or "unskew").partition(".")[0]
        if name == "unskew":  # a fault of ours, not of the installation
            raise
        extras = "platform,trainer" if name == "torch" else "platform"
        print(f"unskew needs {name}, which is not installed: pip install 'unskew[{extras}]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
