"""Solvers of A x = b, where A is symmetric and only its products with vectors are known.

They are independent of problems and losses: ``Neumann(terms=20).solve(A, b)`` takes any callable.
"""

from .base import MakesPreconditioner, Solver, Wants
from .direct import Exact, Identity, Inverse
from .gmres import GMRES
from .krylov import ConjugateGradient
from .minimal_residual import MINRES
from .neumann import Neumann
from .nystrom import Nystrom
from .stochastic import SOBA
from .system import Preconditioner, Product, Report, Solution, Status, System

__all__ = [
    "GMRES",
    "MINRES",
    "SOBA",
    "ConjugateGradient",
    "Exact",
    "Identity",
    "Inverse",
    "MakesPreconditioner",
    "Neumann",
    "Nystrom",
    "Preconditioner",
    "Product",
    "Report",
    "Solution",
    "Solver",
    "Status",
    "System",
    "Wants",
]
