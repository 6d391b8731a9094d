"""Runs of a problem's losses without side effects, and with derivatives that can be differentiated again."""

from .passes import Passes

__all__ = ["Passes"]
