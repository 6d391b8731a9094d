"""Steps of the weights under an ℓ1 penalty, which stop at zero."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EvaluationError
from .protocol import Kinked


@contextmanager
def orthant_wise(model: nn.Module, *penalties: Kinked) -> Iterator[None]:
    """Keep one step of the weights within their orthant, so that an ℓ1 penalty brings weights to exactly zero.

        with orthant_wise(model, decay):  # after the backward pass
            optimizer.step()

    With the gradient g of the training loss without the penalty, and the penalty's rate r, a weight
    - that the step takes across zero becomes zero;
    - of zero with |g| ≤ r is held there;
    - of zero with |g| > r may leave to the side of −g alone.

    Nothing is shrunk twice: the gradient of the training loss has the penalty in it already, but at zero, where torch
    takes the derivative of |w| as zero. There ``.grad`` becomes the derivative towards the side of −g, which is zero
    for weights that are held. A minimum of the training loss is a fixed point, for SGD, momentum and Adam alike.
    `Tuner` does this around each step of a torch optimiser; a loop of yours, or a ``weight_optimizer`` that is a
    function, does it itself, before it clips gradients and after it takes the scale of a GradScaler out of them.

    With mini-batches, a weight of zero is held where the gradient of the batch says so. Where the noise of that is as
    large as the rate, weights leave and come back, and only some are at zero at a time: take larger batches. It keeps a
    copy of the weights during the step.

    Args:
        model: what the penalties are called with.
        penalties: modules with ``rates_at_zero(model)``, such as ``WeightDecay(power=1)``, that the training loss adds
            with a factor of one. All that act on the same weight go into one call.

    Raises:
        EvaluationError: no weight has a gradient, or the model lacks a weight of a penalty.

    Reference: Andrew and Gao (2007), the projection of OWL-QN.
    """
    sides = _sides(model, penalties)
    yield
    with torch.no_grad():
        for w, side in sides:
            stop_at_zero_(w, side)


def joint_rates(model: nn.Module, penalties: Iterable[Kinked]) -> dict[str, Tensor]:
    """The slopes of all penalties together beside a weight of zero, by weight."""
    total: dict[str, Tensor] = {}
    for penalty in penalties:
        for name, rate in penalty.rates_at_zero(model).items():
            total[name] = total[name] + rate if name in total else rate
    return total


def fitting(hyper: nn.Module, model: nn.Module) -> tuple[list[Kinked], list[Kinked]]:
    """The modules in ``hyper`` with kinks at zero: those made for this model, and those made for a part of it."""
    fit: list[Kinked] = []
    others: list[Kinked] = []
    for module in hyper.modules():
        # By class: a module that hands all on to one inside it would count twice.
        if issubclass(type(module), Kinked):
            penalty: Any = module
            try:
                if penalty.rates_at_zero(model):
                    fit.append(penalty)
            except EvaluationError:
                others.append(penalty)
    return fit, others


def one_sided_(gradient: Tensor, w: Tensor, rate: Tensor) -> Tensor:
    """Make the gradient one-sided, in place, and return the side: a tensor whose signs a step may give the weights.

    For a weight of zero it becomes the derivative to the side of −gradient, 0 where the rate holds the weight.
    """
    at_zero = w == 0
    # In place: where there are millions of weights, memory that is taken anew costs as much as the arithmetic.
    side = gradient.clamp(-rate, rate).mul_(at_zero)
    gradient.sub_(side)
    return torch.mul(gradient, at_zero, out=side).neg_().add_(w)


def stop_at_zero_(w: Tensor, side: Tensor) -> None:
    """Put zeros in the place of the weights that a step took across zero, and of no NaN; ``side`` is lost."""
    w.masked_fill_(side.mul_(w) <= 0, 0.0)


@torch.no_grad()
def _sides(model: nn.Module, penalties: Iterable[Kinked]) -> list[tuple[Tensor, Tensor]]:
    """Each weight with the side that it may be on after the step."""
    rates = joint_rates(model, penalties)
    weights = {name: w for name, w in model.named_parameters() if name in rates}
    sides: list[tuple[Tensor, Tensor]] = []
    for name, w in weights.items():
        if w.grad is not None:
            sides.append((w, one_sided_(w.grad, w, rates[name])))
    if weights and not sides:
        raise EvaluationError(
            f"orthant_wise needs the gradients of the weights; got none for {list(weights)[:5]}. Use it after the "
            "backward pass, around optimizer.step()."
        )
    return sides
