"""Solvers of A x = b, where A is symmetric and known by its products with vectors only.

They have never heard of problems or losses: ``Neumann(terms=20).solve(A, b)`` takes any callable.
"""

from .base import Report, Solution, Solver, Status
from .direct import Exact, Identity
from .krylov import ConjugateGradient
from .neumann import Neumann

__all__ = [
    "ConjugateGradient",
    "Exact",
    "Identity",
    "Neumann",
    "Report",
    "Solution",
    "Solver",
    "Status",
]
