"""Preconditioners: a function, a curvature's inverse, a known diagonal, and pairs from earlier solves."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentError, ArgumentTypeError
from .base import MakesPreconditioner
from .system import Product, System

# A direction s and its product y = (A + δI) s as vectors, both divided by √sᵀy, so that sᵀy = 1.
Pair = tuple[Tensor, Tensor]


def pair(p: Tree, product: Tree, damping: float, curvature: float) -> Pair:
    """The pair of a direction and A p, where pᵀ(A + δI)p = ``curvature`` > 0."""
    s, y = _tree.flatten(p), _tree.flatten(product)
    size = 1.0 / math.sqrt(curvature)
    return s.mul(size), y.add_(s, alpha=damping).mul_(size)


def kept_pairs(system: System) -> list[Pair]:
    """The pairs of earlier solves, unless the number, precision or device of the weights has changed."""
    pairs: list[Pair] = system.memory.get("pairs", [])
    n, dtype = _tree.size(system.b), _tree.vector_dtype(system.b)
    device = next(iter(system.b.values())).device
    fits = all(s.numel() == n and s.dtype == dtype and s.device == device for s, _ in pairs)
    return pairs if fits else []


def check_preconditioner(owner: str, preconditioner: object) -> None:
    """Raise unless a solver's argument is None, a function, or a curvature with an inverse."""
    known = (
        preconditioner is None or callable(preconditioner) or isinstance(preconditioner, MakesPreconditioner)
    )
    if not known or isinstance(preconditioner, type):
        raise ArgumentTypeError(
            f"{owner}.preconditioner must be a function r -> M⁻¹r, or a curvature that has an inverse, "
            f"such as KFAC(predict, loss, rest); got {preconditioner!r}."
        )


def source_of(preconditioner: object) -> MakesPreconditioner | None:
    """The curvature whose inverse a solver needs; None if it has a function or nothing."""
    return preconditioner if isinstance(preconditioner, MakesPreconditioner) else None


def given_preconditioner(preconditioner: object, system: System, damping: float | None) -> Product | None:
    """M⁻¹ at this damping; None without a preconditioner, and for a curvature while no damping is chosen."""
    if preconditioner is None:
        return None
    if not isinstance(preconditioner, MakesPreconditioner):
        assert callable(preconditioner)
        return checked(preconditioner)
    if system.preconditioner is None:
        raise ArgumentError(
            f"the preconditioner {preconditioner!r} needs a problem and a batch: solve through Implicit(...), or pass "
            "preconditioner=... to solve."
        )
    return None if damping is None else system.preconditioner.at(damping)


def checked(preconditioner: Product) -> Product:
    """A caller's preconditioner; raises if its result does not fit, or if it is not positive definite."""

    def apply(r: Tree) -> Tree:
        z = preconditioner(r)
        if not isinstance(z, dict) or not _tree.same_layout(z, r):
            raise ArgumentError(
                "a preconditioner must return a tensor for each of r's, of its shape, dtype and device; got "
                f"{sorted(z)[:5] if isinstance(z, dict) else type(z).__name__} for {sorted(r)[:5]}."
            )
        if not _tree.dot(r, z) > 0.0 and _tree.norm(r) > 0.0:
            raise ArgumentError(
                f"a preconditioner must be positive definite; got rᵀM⁻¹r = {_tree.dot(r, z):.3g}. Give the inverse of "
                "a matrix with positive eigenvalues, near A + δI."
            )
        return z

    return apply


def diagonal_inverse(diagonal: Tree, damping: float) -> Product:
    """Maps r to M⁻¹ r with M = diag|d| + δ; without damping, the mean of d replaces δ."""
    size = {name: d.detach().abs() for name, d in diagonal.items()}
    shift = damping or sum(float(d.sum()) for d in size.values()) / _tree.size(size) or 1.0
    inverse = {name: 1.0 / (d + shift) for name, d in size.items()}
    return lambda r: {name: x * inverse[name] for name, x in r.items()}


def quasi_newton(pairs: Sequence[Pair], initial: Product | None) -> Product:
    """The inverse of a limited-memory BFGS matrix, by the two-loop recursion.

        H_j = (I − s yᵀ) H_{j−1} (I − y sᵀ) + s sᵀ,    newest pair last; H₀ is ``initial`` or sᵀy/yᵀy · I

    H is positive definite, and H y = s for the newest pair. It needs the pairs' storage and four vectors.

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
