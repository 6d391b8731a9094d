"""Checks that every solver, curvature, method and module of hyperparameters must pass.

They are for our tests, and for classes of your own. Each raises AssertionError with what was required and what was got,
and returns nothing. They compare with the dense answer, or with differences.
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
