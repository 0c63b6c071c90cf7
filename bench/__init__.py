"""Measurements of Lily and what they need: synthetic checkpoints, timing loops, records.

Each module is a program, run from the root of the repository as `python -m bench.NAME`.
"""

import sys
from collections.abc import Callable

from lily.errors import LilyError


def run(main: Callable[[], object]) -> None:
    """Run a program's main and end the process: what it was given wrong is one line, not a traceback."""
    try:
        sys.exit(main())  # type: ignore[arg-type]
    except KeyboardInterrupt:
        sys.exit(130)
    except (LilyError, OSError, ValueError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
