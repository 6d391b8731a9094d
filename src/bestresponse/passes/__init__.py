"""Running a problem's losses without leaving a trace, and with derivatives that can be differentiated again."""

from .passes import Passes

__all__ = ["Passes"]
