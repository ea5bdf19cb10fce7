"""The `unskew` command, also as `python -m unskew`; exit codes: 0 done, 1 the work failed, 2 bad usage or input."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # built in: nothing is loaded before the next lines
import sys

if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while it loads ends it without a word


def main() -> None:
    """The command; where the packages it needs are not installed, it names the extra that brings them."""
    try:
        from unskew.cli import app
        from unskew.commands.common import ctrl_c

        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, ctrl_c)
        try:
            app()
        finally:  # nothing is left to be tidied up
            if signal.getsignal(signal.SIGINT) is ctrl_c:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # before a command began that knows what to do with it
        sys.exit(130)
    except ModuleNotFoundError as error:
        name = (error.name or "unskew").partition(".")[0]
        if name == "unskew":
            from pathlib import Path

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
