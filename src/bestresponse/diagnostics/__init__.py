"""Is a problem ready to be tuned, which method suits it, and what does it cost? One call tells."""

from .check import Check, check
from .findings import Finding

__all__ = ["Check", "Finding", "check"]
