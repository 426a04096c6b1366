"""What programs that talk with their user share."""

import sys
from collections.abc import Iterator


def lines() -> Iterator[str]:
    """Yields the lines of the standard input that are not blank, after a prompt at a terminal."""
    prompt = "> " if sys.stdin.isatty() else ""
    sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        if line:
            yield line
