"""Solvers of A x = b, where A is symmetric and known by its products with vectors only.

They have never heard of problems or losses: ``Neumann(terms=20).solve(A, b)`` takes any callable.
"""

from .base import Solver
from .direct import Exact, Identity
from .gmres import GMRES
from .krylov import ConjugateGradient
from .minimal_residual import MINRES
from .neumann import Neumann
from .nystrom import Nystrom
from .stochastic import SOBA
from .system import Report, Solution, Status

__all__ = [
    "GMRES",
    "MINRES",
    "SOBA",
    "ConjugateGradient",
    "Exact",
    "Identity",
    "Neumann",
    "Nystrom",
    "Report",
    "Solution",
    "Solver",
    "Status",
]
