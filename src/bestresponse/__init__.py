"""Tune millions of hyperparameters while a PyTorch model trains."""

from . import callbacks, diagnostics, hypernetworks, hyperparameters, losses, rules, solvers, testing
from .baselines import SearchResult, search
from .batches import Batches
from .curvature import Hessian
from .direct import Direct
from .empirical_fisher import EmpiricalFisher
from .errors import BestResponseWarning, Error
from .finite_difference import FiniteDifference
from .gauss_newton import GaussNewton
from .implicit import Implicit
from .kfac import KFAC
from .linearisation import Curvature, Linearisation
from .method import Method, backward, hypergradient
from .penalty import Penalty
from .problem import Problem
from .result import Hypergradient
from .sama import SAMA
from .solvers import MINRES, ConjugateGradient, Exact, Identity, Neumann, Nystrom, Solver, Status
from .tuner import Tuner
from .unrolled import Forward, Unrolled

__version__ = "0.1.0"


__all__ = [
    "KFAC",
    "MINRES",
    "SAMA",
    "Batches",
    "BestResponseWarning",
    "ConjugateGradient",
    "Curvature",
    "Direct",
    "EmpiricalFisher",
    "Error",
    "Exact",
    "FiniteDifference",
    "Forward",
    "GaussNewton",
    "Hessian",
    "Hypergradient",
    "Identity",
    "Implicit",
    "Linearisation",
    "Method",
    "Neumann",
    "Nystrom",
    "Penalty",
    "Problem",
    "SearchResult",
    "Solver",
    "Status",
    "Tuner",
    "Unrolled",
    "backward",
    "callbacks",
    "diagnostics",
    "hypergradient",
    "hypernetworks",
    "hyperparameters",
    "losses",
    "rules",
    "search",
    "solvers",
    "testing",
]
