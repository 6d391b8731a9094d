"""The gradient of the validation loss."""

from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..batches import weighted
from ..errors import NotFiniteError
from ..passes import graph
from ..passes.running_statistics import Reading
from ..problem import Passes
from .reach import reaches, unreached_by_validation


def validation_gradient(
    passes: Passes,
    batch: Any,
    read: Reading,
    weights: Tree | None = None,
    through_weights: bool = True,
) -> tuple[float, Tree, dict[str, Tensor | None]]:
    """L_V, ∂L_V/∂w (zero if L_V does not depend on w) and ∂L_V/∂λ (None if not on λ), running statistics included.

    With ``through_weights`` it raises if L_V depends on no weight.
    """
    problem = passes.problem
    at = problem.weights if weights is None else weights
    inputs = [*at.values(), *problem.hyperparameters.values()]
    # Two further numbers: the loss, and one that is there if the loss depends on a weight.
    numbers = [_tree.number(at)] * 2
    value, reached, *found = problem.group.mean(
        lambda: _of_batches(passes, batch, read, weights, inputs, len(at)),
        [*numbers, *inputs, *read.places],
        batch,
    )
    assert value is not None
    if through_weights and reached is None:
        raise unreached_by_validation(problem)
    read.adopt(found[len(inputs) :])
    total = list(map(graph.plus, found, read.followed(inputs, weights)))
    of_weights = {
        n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(at.items(), total, strict=False)
    }
    direct: dict[str, Tensor | None] = dict(zip(problem.hyperparameters, total[len(at) :], strict=True))
    if bad := _tree.not_finite(of_weights) + _tree.not_finite(direct):
        raise NotFiniteError(
            f"the gradient of val_loss must be finite; got NaN or infinity for {bad[:5]}. "
            "Look for sqrt, log or division at zero in val_loss."
        )
    return float(value), of_weights, direct


def _of_batches(
    passes: Passes,
    batch: Any,
    read: Reading,
    weights: Tree | None,
    inputs: list[Tensor],
    number_of_weights: int,
) -> list[Tensor | None]:
    """On this process: the loss, a number if it depends on a weight, its gradient, and that by running statistics."""
    total: list[Tensor | None] = [None] * len(inputs)
    value, reached = 0.0, False
    # One batch's graph at a time. The backward pass also runs in the mode of the loss.
    for number, (piece, weight) in enumerate(weighted(batch)):
        with passes.numbered(number), passes.validating():
            with read:
                loss = passes.val_loss(piece, weights)
            graph.refuse_reentrant(loss)
            passes.rewind()
            gradients = [None if g is None else _tree.dense(g) for g in read.gradients(loss, inputs, weight)]
        at = number_of_weights
        reached = reached or reaches(loss, gradients[:at], inputs[:at])
        total = [graph.plus(sofar, g, weight) for sofar, g in zip(total, gradients, strict=True)]
        value += weight * float(loss.detach())
    of_value = torch.tensor(value, dtype=torch.float64)
    return [of_value, of_value if reached else None, *total, *read.kept]
