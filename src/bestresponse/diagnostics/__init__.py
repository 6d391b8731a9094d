"""One call that checks whether a problem is ready for tuning, and compares the results and costs of the methods."""

from .check import Check, check
from .findings import Finding

__all__ = ["Check", "Finding", "check"]
