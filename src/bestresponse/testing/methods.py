"""Checks of a method: its parts, its side effects and its answer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from ..methods import Method, hypergradient
from ..problem import Problem
from .comparison import NoTrace, relative_error


def check_method(
    method: Method,
    problem: Problem,
    train_batch: Any,
    val_batch: Any,
    expected: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Check a method on one problem.

    Its hypergradient has the names and shapes of the hyperparameters, is the sum of its two parts, is
    the same for a second object with the same settings, and equals ``expected``. Nothing may be left behind.

    Args:
        method: the method to check.
        problem: the problem, in float64.
        train_batch: the training batch.
        val_batch: the validation batch.
        expected: the hypergradient by hyperparameter, from a closed form or a re-solved problem.
        tolerance: the largest relative error.
    """
    problem.forget(method)
    with NoTrace(problem):
        result = hypergradient(problem, train_batch, val_batch, method, seed=1)
        problem.forget(method)
        again = hypergradient(problem, train_batch, val_batch, method, seed=1)
    assert result.total.keys() == problem.hyperparameters.keys(), f"{method!r} must name every hyperparameter"
    for name, parameter in problem.hyperparameters.items():
        total = result.total[name]
        assert total.shape == parameter.shape, f"{method!r}: the shape of {name} must be {parameter.shape}"
        assert torch.equal(total, result.direct[name] + result.indirect[name]), f"{method!r}: total ≠ sum"
        assert torch.equal(total, again.total[name]), f"{method!r} must give {name} the same twice"
    if expected is not None:
        error = relative_error(_tree.flatten(result.total), _tree.flatten(dict(expected)))
        assert error <= tolerance, f"{method!r} must be right to {tolerance}; got an error of {error:.2g}."
