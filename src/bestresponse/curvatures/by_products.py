"""Mixed products as by-products: a product A v already makes most of the backward pass that v · ∂²L_T/∂w∂λ needs.

A solution is a combination x = Σ c_i v_i of the vectors that were multiplied, so that its mixed product is the same
combination of theirs, and costs no pass of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._tree import Tree
from ..passes import graph
from ..problem import Problem
from ..solvers import Solution
from .base import Linearisation

Derivatives = dict[str, Tensor | None]
# The products of a solve, roughly: what a product adds for the hyperparameters is paid so many times.
_PRODUCTS = 8
_shared: WeakKeyDictionary[Problem, bool] = WeakKeyDictionary()


class ByProducts:
    """The products of a linearisation, which keep the mixed products of the same vectors.

    Attributes:
        system: the linearisation.
    """

    def __init__(self, system: Linearisation) -> None:
        self.system = system
        self._found: list[Derivatives | None] = []
        self._kept = 0

    def __call__(self, v: Tree) -> Tree:
        # After many products they would take more memory than a vector of weights, and then more than a pass is worth.
        full = self._kept > sum(x.numel() for x in v.values())
        both = None if full else self.system.with_mixed(v)
        product, found = (self.system(v), None) if both is None else both
        self._found.append(found)
        self._kept += sum(x.numel() for x in (found or {}).values() if x is not None)
        return product

    def of(self, solution: Solution) -> Derivatives | None:
        """The mixed product of a solution; None if it has to be computed."""
        if solution.combination is None:
            return None
        parts = [(self._found[number], c) for number, c in solution.combination.items()]
        total: Derivatives = {}
        for part, c in parts:
            if part is None:
                return None
            total = {n: graph.plus(total.get(n), x, c) for n, x in part.items()}
        return total or None


def shares_its_pass(
    problem: Problem,
    gradient: Mapping[str, GradientEdge],
    weights: Sequence[Tensor],
    others: Sequence[Tensor],
) -> bool:
    """Whether the pass to the weights makes nearly the whole of that to other leaves, which are few numbers.

    It is found on the first call for a problem.
    """
    if problem not in _shared:
        _shared[problem] = few(others, weights) and _nearly(
            gradient, {id(w) for w in weights}, {id(x) for x in others}
        )
    return _shared[problem]


def few(numbers: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether some vectors of the first kind take less memory than one of the second."""
    return _PRODUCTS * sum(x.numel() for x in numbers) <= sum(x.numel() for x in others)


def _nearly(gradient: Mapping[str, GradientEdge], weights: set[int], others: set[int]) -> bool:
    """Whether few of the nodes on the paths to ``others`` are on no path to ``weights``."""
    leads: dict[Any, tuple[bool, bool]] = {}
    pending: list[tuple[Any, bool]] = [(edge.node, False) for edge in gradient.values()]
    while pending:
        node, visited = pending.pop()
        if visited:
            below = [leads[n] for n, _ in node.next_functions if n is not None]
            leaf = id(node.variable) if hasattr(node, "variable") else 0
            leads[node] = (
                leaf in weights or any(one for one, _ in below),
                leaf in others or any(other for _, other in below),
            )
        elif node not in leads:
            leads[node] = (False, False)
            pending.append((node, True))
            pending += [(n, False) for n, _ in node.next_functions if n is not None and n not in leads]
    whole = sum(other for _, other in leads.values())
    return _PRODUCTS * sum(other and not one for one, other in leads.values()) <= whole
