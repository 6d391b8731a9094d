"""Checks of a curvature, against differences of the training gradient."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..curvatures import Curvature
from ..problem import Problem
from ..solvers.direct import dense
from ..verification.probe import gradient
from .comparison import NoTrace, places, relative_error


def check_curvature(
    curvature: Curvature,
    problem: Problem,
    batch: Any,
    matrix: Tensor | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Check a curvature's products and mixed term on one batch of a small float64 problem.

    The products must make up ``matrix``, be symmetric, and be the same twice. The mixed term must be
    the central difference of the training gradient along each hyperparameter. Nothing may be left behind.

    Args:
        curvature: the curvature to check.
        problem: a problem with at most a few hundred weights and hyperparameters, in float64.
        batch: a training batch.
        matrix: the dense A, [n, n] in the order of the weights; None takes central differences of the
            training gradient, which is the Hessian.
        tolerance: the largest relative error.
    """
    with NoTrace(problem), problem.undisturbed() as passes:
        system = curvature.linearise(passes, batch)
        like = {n: problem.weights[n].detach() for n in system.names}
        measured = dense(system, like)
        again = dense(system, like)
        v = _tree.unflatten(torch.linspace(-1, 1, len(measured), dtype=torch.float64), like)
        mixed = system.mixed(v)
    if matrix is None:
        matrix = differences(problem, batch, problem.weights)
    largest = float(matrix.abs().max()) or 1.0
    for what, other, bound in (
        ("the dense matrix", matrix, tolerance),
        ("its own transpose", measured.T, tolerance),
        ("itself on the second call", again, 1e-13),
    ):
        error = float((measured - other).abs().max()) / largest
        assert error <= bound, f"{curvature!r} must equal {what} to {bound}; got an error of {error:.2g}."
    _check_mixed(curvature, problem, batch, like, v, mixed, tolerance)


def _check_mixed(
    curvature: Curvature, problem: Problem, batch: Any, like: Tree, v: Tree, mixed: Any, tolerance: float
) -> None:
    inputs = problem.hyperparameters
    rows = torch.cat([torch.full((w.numel(),), n in like) for n, w in problem.weights.items()])
    expected = differences(problem, batch, inputs)[rows].T @ _tree.flatten(v)
    filled = {n: torch.zeros_like(p) if mixed[n] is None else mixed[n] for n, p in inputs.items()}
    error = relative_error(_tree.flatten(filled), expected)
    assert error <= tolerance, (
        f"the mixed term of {curvature!r} must equal differences of the training gradient to {tolerance}; "
        f"got an error of {error:.2g}."
    )


def differences(problem: Problem, batch: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """∂²L_T/∂w∂inputs by central differences of fourth order, [weights, inputs].

    ``inputs`` are live parameters, such as ``problem.hyperparameters``, whose values are moved and restored.
    """
    weights, step = problem.weights, 1e-3
    columns = []
    with _tree.put_back(inputs), problem.undisturbed(twice=False) as passes:
        for parameter in inputs.values():
            values = parameter.detach()
            for index in places(values):
                column = torch.zeros(_tree.size(weights), dtype=torch.float64)
                for shift, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
                    kept = values[index].clone()
                    values[index] += shift * step
                    column += (
                        factor / (12.0 * step) * _tree.flatten(gradient(passes.train_loss(batch), weights))
                    )
                    values[index] = kept
                columns.append(column)
    return torch.stack(columns, dim=1)
