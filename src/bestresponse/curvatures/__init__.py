"""What is A? Matrices that represent the curvature of the training loss."""

from .automatic import Automatic
from .base import Curvature, Linearisation
from .empirical_fisher import EmpiricalFisher
from .finite_difference import FiniteDifference
from .gauss_newton import GaussNewton
from .hessian import Hessian
from .kfac import KFAC

__all__ = [
    "KFAC",
    "Automatic",
    "Curvature",
    "EmpiricalFisher",
    "FiniteDifference",
    "GaussNewton",
    "Hessian",
    "Linearisation",
]
