"""Preconditioners of conjugate gradient: a known diagonal, and the curvature that earlier solves met."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree

Preconditioner = Callable[[Tree], Tree]
# A direction s and its product y = (A + δI) s as vectors, both divided by √sᵀy, so that sᵀy = 1.
Pair = tuple[Tensor, Tensor]


def pair(p: Tree, product: Tree, damping: float, curvature: float) -> Pair:
    """The pair of a direction and A p, where pᵀ(A + δI)p = ``curvature`` > 0."""
    s, y = _tree.flatten(p), _tree.flatten(product)
    size = 1.0 / math.sqrt(curvature)
    return s.mul(size), y.add_(s, alpha=damping).mul_(size)


def diagonal_inverse(diagonal: Tree, damping: float) -> Preconditioner:
    """Maps r to M⁻¹ r with M = diag(d) + δ; where there is no damping, the mean of d stands for it."""
    shift = damping or sum(float(d.sum()) for d in diagonal.values()) / _tree.size(diagonal) or 1.0
    inverse = {name: 1.0 / (d.detach() + shift) for name, d in diagonal.items()}
    return lambda r: {name: x * inverse[name] for name, x in r.items()}


def quasi_newton(pairs: Sequence[Pair], initial: Preconditioner | None) -> Preconditioner:
    """The inverse of a limited-memory BFGS matrix, by the two-loop recursion.

        H_j = (I − s yᵀ) H_{j−1} (I − y sᵀ) + s sᵀ,    newest pair last; H₀ is ``initial`` or sᵀy/yᵀy · I

    H is positive definite, and H y = s for the newest pair. A sum of the pairs' storage and four vectors.

    Reference: Morales and Nocedal (2000); Nocedal and Wright, Numerical Optimization, algorithm 7.4.
    """
    _, newest = pairs[-1]
    gamma = 1.0 / float(torch.dot(newest, newest))

    def apply(r: Tree) -> Tree:
        q = _tree.flatten(r)
        along = []
        for s, y in reversed(pairs):
            along.append(float(torch.dot(s, q)))
            q.sub_(y, alpha=along[-1])
        z = q.mul_(gamma) if initial is None else _tree.flatten(initial(_tree.unflatten(q, r)))
        for s, y in pairs:
            z.add_(s, alpha=along.pop() - float(torch.dot(y, z)))
        return _tree.unflatten(z, r)

    return apply
