"""Checks that every solver, curvature, method and module of hyperparameters must pass.

The library's tests use them, and you can use them for your own classes. Each check returns nothing, or raises
AssertionError with the required and the actual result. They compare with the dense answer, or with differences.
"""

from .curvatures import check_curvature, differences
from .hyperparameters import check_hyperparameters
from .methods import check_method
from .solvers import check_solver
from .systems import LinearSystem, linear_systems

__all__ = [
    "LinearSystem",
    "check_curvature",
    "check_hyperparameters",
    "check_method",
    "check_solver",
    "differences",
    "linear_systems",
]
