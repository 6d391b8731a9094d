"""Tune millions of hyperparameters while a PyTorch model trains."""

from . import diagnostics, hypernetworks, hyperparameters, losses, solvers, testing
from .batches import Batches
from .cross_validation import Folds, cross_validate
from .curvatures import (
    KFAC,
    Curvature,
    EmpiricalFisher,
    FiniteDifference,
    GaussNewton,
    Hessian,
    Linearisation,
)
from .errors import BestResponseWarning, Error

# ``bestresponse.influence`` and ``bestresponse.search`` are functions, not the modules of these names. A module binds
# its name once, when it is first imported, so later imports of it leave the function in place.
from .influence import influence
from .methods import (
    SAMA,
    Direct,
    Forward,
    Halves,
    Hypergradient,
    Implicit,
    Method,
    Penalty,
    Unrolled,
    backward,
    hypergradient,
    rules,
)
from .problem import Problem
from .runs import callbacks
from .search import SearchResult, search
from .solvers import MINRES, ConjugateGradient, Exact, Identity, Neumann, Nystrom, Solver, Status
from .tuner import Tuner

__version__ = "0.2.0"


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
    "Folds",
    "Forward",
    "GaussNewton",
    "Halves",
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
    "cross_validate",
    "diagnostics",
    "hypergradient",
    "hypernetworks",
    "hyperparameters",
    "influence",
    "losses",
    "rules",
    "search",
    "solvers",
    "testing",
]
