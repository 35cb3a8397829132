"""The terminal's door. This file stays light, so that Ctrl-C is understood from the first moment."""

from __future__ import annotations

import sys
from typing import NoReturn


def entry() -> NoReturn:
    """The console script: one command line, its exit code."""
    try:
        from clearway.cli.main import main

        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
