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
    """Keep one step of the weights within their orthant; an ℓ1 penalty then brings weights to exactly zero.

        with orthant_wise(model, decay):  # after the backward pass
            optimizer.step()

    With the gradient g of the training loss without the penalty, and the penalty's rate r, a weight
    - that the step takes across zero becomes zero;
    - at zero with |g| ≤ r stays there;
    - at zero with |g| > r may leave only to the side of −g.

    Nothing is shrunk twice: the gradient of the training loss already includes the penalty, except at zero, where torch
    takes the derivative of |w| as zero. There ``.grad`` becomes the derivative towards the side of −g, which is zero
    for weights that stay. A minimum of the training loss is a fixed point, for SGD, momentum and Adam alike.
    `Tuner` does this around each step of a torch optimiser. Your own loop, or a ``weight_optimizer`` that is a
    function, must do it itself, before it clips gradients and after a GradScaler unscales them.

    With mini-batches, the gradient of the batch decides whether a weight stays at zero. If its noise is as
    large as the rate, weights leave and come back, and only some are at zero at a time: use larger batches. The context
    keeps a copy of the weights during the step.

    Args:
        model: the model to call the penalties with.
        penalties: modules with ``rates_at_zero(model)``, such as ``WeightDecay(power=1)``, that the training loss adds
            with a factor of one. Pass all that act on the same weight in one call.

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
    """The total slope of all penalties next to a weight of zero, by weight."""
    total: dict[str, Tensor] = {}
    for penalty in penalties:
        for name, rate in penalty.rates_at_zero(model).items():
            total[name] = total[name] + rate if name in total else rate
    return total


def fitting(hyper: nn.Module, model: nn.Module) -> tuple[list[Kinked], list[Kinked]]:
    """The modules in ``hyper`` with kinks at zero: those made for this model and those made for a part of it."""
    fit: list[Kinked] = []
    others: list[Kinked] = []
    for module in hyper.modules():
        # By class: a module that forwards every attribute to an inner module would count twice.
        if issubclass(type(module), Kinked):
            penalty: Any = module
            try:
                if penalty.rates_at_zero(model):
                    fit.append(penalty)
            except EvaluationError:
                others.append(penalty)
    return fit, others


def one_sided_(gradient: Tensor, w: Tensor, rate: Tensor) -> Tensor:
    """Make the gradient one-sided, in place, and return the side: a tensor with the signs that the weights may take.

    For a weight of zero the gradient becomes the derivative to the side of −gradient, or 0 if the rate holds the
    weight.
    """
    at_zero = w == 0
    # In place: with millions of weights, allocating memory costs as much as the arithmetic.
    side = gradient.clamp(-rate, rate).mul_(at_zero)
    gradient.sub_(side)
    return torch.mul(gradient, at_zero, out=side).neg_().add_(w)


def stop_at_zero_(w: Tensor, side: Tensor) -> None:
    """Set weights that a step took across zero to zero, but keep NaN; ``side`` is overwritten."""
    w.masked_fill_(side.mul_(w) <= 0, 0.0)


@torch.no_grad()
def _sides(model: nn.Module, penalties: Iterable[Kinked]) -> list[tuple[Tensor, Tensor]]:
    """Each weight with the side where it may be after the step."""
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
