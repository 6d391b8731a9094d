"""Gradients at other weights than the present ones, through the model itself, and a check of their rounding."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..errors import EvaluationError
from ..passes import graph
from ..passes.arithmetic import Arithmetic, arithmetic
from ..passes.resolution import APART
from ..passes.running_statistics import Reading
from ..problem import Passes, Problem

# A difference of at most so many units in the last place of the gradients may be rounding.
_SMALL = 100.0


@contextmanager
def weights_at(problem: Problem, values: Tree) -> Iterator[None]:
    """Give the live weights other values, and restore them afterwards."""
    with _tree.put_back(problem.weights):
        _tree.write_(problem.weights, values)
        yield


def train_gradients(
    passes: Passes, batch: Any, inputs: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor | None]]:
    """L_T and its gradient by input; None for inputs that the loss does not reach."""
    listed = list(inputs.values())

    def own() -> list[Tensor | None]:
        loss = passes.train_loss(batch)
        graph.refuse_reentrant(loss)
        return [loss.detach(), *torch.autograd.grad(loss, listed, allow_unused=True)]

    value, *found = passes.problem.group.mean(own, [_tree.number(passes.problem.weights), *listed], batch)
    assert value is not None
    return float(value), dict(zip(inputs, found, strict=True))


def val_gradients(
    passes: Passes, batches: tuple[Any, Any], inputs: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor | None], Reading]:
    """L_V, its gradient by input including the part through running statistics, and the statistics that L_V read.

    The backward pass also runs in the mode of the validation loss.
    """
    read, listed = Reading(passes, batches[0]), list(inputs.values())

    def own() -> list[Tensor | None]:
        with passes.validating():
            with read:
                loss = passes.val_loss(batches[1])
            passes.rewind()
            graph.refuse_reentrant(loss)
            return [loss.detach(), *read.gradients(loss, listed), *read.kept]

    like = [_tree.number(passes.problem.weights), *listed, *read.places]
    value, *found = passes.problem.group.mean(own, like, batches[1])
    assert value is not None
    read.adopt(found[len(listed) :])
    through = read.followed(listed)
    total = {n: graph.plus(g, x) for n, g, x in zip(inputs, found, through, strict=False)}
    return float(value), total, read


@dataclass(frozen=True)
class Here:
    """Both losses at the present weights.

    Attributes:
        train, val: their values.
        reached: the identities of the leaves that the training loss depends on.
        validates: whether the validation loss depends on a weight.
        arithmetic: the precision in which the training loss computes.
    """

    train: float
    val: float
    reached: set[int]
    validates: bool
    arithmetic: Arithmetic


def losses(passes: Passes, batches: tuple[Any, Any]) -> Here:
    """Both losses at the present weights; raises if one is not finite."""
    problem, group = passes.problem, passes.problem.group

    def of(run: Callable[[Any], Tensor], batch: Any) -> tuple[float, Tensor, set[int]]:
        kept = list[Tensor]()

        def own() -> list[Tensor | None]:
            kept.append(run(batch))
            return [kept[0].detach()]

        (value,) = group.mean(own, [_tree.number(passes.problem.weights)], batch)
        assert value is not None
        return float(value), kept[0], group.reached(problem.live(), graph.leaves(kept[0]))

    train, loss, reached = of(passes.train_loss, batches[0])
    val, _, by_validation = of(passes.val_loss, batches[1])
    validates = not by_validation.isdisjoint(map(id, problem.weights.values()))
    return Here(train, val, reached, validates, arithmetic(loss))


def verify_difference(
    passes: Passes, y: Tree, z: Tree, batches: tuple[Any, Any], gamma: float, precision: Arithmetic
) -> None:
    """Raise, or warn in float32 and above, if ∂L_T(y) − ∂L_T(z) is rounding, at four training gradients.

    For smooth gradients, the third difference of gradients at four equidistant points between z and y is rounding:
    √20 times that of one gradient, and √10 times that of ∂L_T(y) − ∂L_T(z). The check compares the gradient of
    hyperparameters with its own difference, and that of weights also with ∂L_V(y)/γ, to which the steps add it.
    """
    problem = passes.problem
    if _tree.norm(_tree.add(y, z, -1.0)) == 0.0:
        return
    inputs = [
        {f"{kind}{n}": x for n, x in tensors.items()}
        for kind, tensors in (("w", problem.weights), ("h", problem.hyperparameters))
    ]
    points = []
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        with weights_at(problem, {n: torch.lerp(x, y[n], share) for n, x in z.items()}):
            points.append(train_gradients(passes, batches[0], inputs[0] | inputs[1])[1])
    with weights_at(problem, y):
        of_val = _norm(val_gradients(passes, batches, inputs[0])[1])
    for mine, other, what in ((inputs[0], of_val, "weights"), (inputs[1], 0.0, "hyperparameters")):
        found = [{n: x for n in mine if (x := point[n]) is not None} for point in points]
        size, whole = _norm(found[0]), _norm(_sum(found, (-1.0, 0.0, 0.0, 1.0)))
        rounding = _norm(_sum(found, (-1.0, 3.0, -3.0, 1.0))) / math.sqrt(10.0)
        if mine is inputs[1]:  # the third difference of a single number may be zero by chance
            rounding = max(
                rounding, max((torch.finfo(x.dtype).eps for x in found[0].values()), default=0.0) * size
            )
        small = whole <= _SMALL * precision.eps * max(size, other)
        if small and size > 0.0 and (whole == 0.0 or rounding > APART * max(whole, other / gamma)):
            _tell(problem, precision, gamma, what)
            return


def _tell(problem: Problem, precision: Arithmetic, gamma: float, of: str) -> None:
    said = (
        "Penalty needs a train_loss whose gradients at its two sets of weights differ by more than rounding; it "
        f"computes in {precision.name}, and with a multiplier of {gamma:g} those with respect to {of} do not. Use a "
        "smaller multiplier or more steps, or compute train_loss in "
        f"{'float32, without autocast' if precision.low else 'float64'}."
    )
    if precision.low:
        raise EvaluationError(said)
    problem.warn_once("unresolved", said)


def _sum(trees: Sequence[Mapping[str, Tensor]], factors: Sequence[float]) -> dict[str, Tensor]:
    total: dict[str, Tensor | None] = dict.fromkeys(trees[0])
    for tree, factor in zip(trees, factors, strict=True):
        total = {n: graph.plus(x, tree.get(n), factor) for n, x in total.items()}
    return {n: x for n, x in total.items() if x is not None}


def _norm(a: Mapping[str, Tensor | None]) -> float:
    return _tree.norm({n: x for n, x in a.items() if x is not None})
