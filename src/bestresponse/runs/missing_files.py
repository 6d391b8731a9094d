"""Runs that continue without a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import FileError
from .events import add_event
from .run import Run


@contextmanager
def tolerated(tuner: Run, missing: str, path: Path) -> Iterator[None]:
    """Let a run continue without a file that cannot be written, unless its policy is "raise".

    Args:
        tuner: the run; its last row gets an event.
        missing: what is missing without the file.
        path: the file.
    """
    try:
        yield
    except FileError as error:
        if tuner.policy == "raise":
            raise
        reason = getattr(error.__cause__, "strerror", None) or error
        add_event(tuner.history[-1], f"{missing} not written", f"{path}, {reason}")
        tuner.problem.warn_once(
            (missing, path), f"{error} The run continues without it. (This warning comes once for each file.)"
        )
